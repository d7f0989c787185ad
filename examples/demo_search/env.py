"""The environment of the search demo: questions about a synthetic world, answered from a corpus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, ClassVar

from examples.demo_search.synthetic_world import SyntheticWorld, make_world
from tidegate.envs.datasets.finite import Finite
from tidegate.envs.rewards import Grade, Reward
from tidegate.envs.search.grading import extract, measures
from tidegate.errors import ConfigError
from tidegate.types import Message, Task


def exact_match(
    output: str | None, answer: Sequence[str], info: Mapping[str, Any], messages: Sequence[Message]
) -> Grade:
    """Reward function: 1 if the last `<answer>` has the right name."""
    measured = measures(extract(output), answer, messages, info["gold"])
    return Grade(measured["em"], measured)


class WorldQuestions(Finite):
    """Questions about people, companies, cities and mayors.

    The held-out questions are about another world that shares no entity with the world of training, with two
    hops ("") and three (`three_hops`).

    Args:
        hops: Facts (1 to 3) that lead to the answer of a training question.
        seed: Determines the worlds and the order of training.

    Raises:
        ConfigError: There are no questions of this many hops.
    """

    name: ClassVar[str] = "world"
    rewards = (Reward("em", exact_match),)

    def __init__(self, hops: int = 2, seed: int = 0) -> None:
        unseen = make_world(seed, "held_out")
        held_out = {"": self._tasks(unseen, 2, seed), "three_hops": self._tasks(unseen, 3, seed)}
        self._set_tasks(self._tasks(make_world(seed, "train"), hops, seed), held_out, seed)

    def gold_output(self, task: Task) -> str:
        return f"<answer>{task.answer[0]}</answer>"

    def _tasks(self, world: SyntheticWorld, hops: int, seed: int) -> list[Task]:
        """Returns the world's questions, shuffled so that the first ones are of all kinds."""
        questions = list(world.questions(hops))
        if not questions:
            raise ConfigError(f"env.options.hops = {hops}; the synthetic world has questions of 1 to 3")
        Random(f"search_qa/{seed}").shuffle(questions)
        tasks = []
        for number, question in enumerate(questions):
            split = question.facts[0].id.rpartition("-")[0]
            gold = {fact.id: fact.text for fact in question.facts}
            messages = [{"role": "user", "content": question.text}]
            id = f"{split}-{question.hops}-{number}"
            tasks.append(Task(id, self.name, messages, [question.answer], {"gold": gold}))
        return tasks

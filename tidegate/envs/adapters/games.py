"""Base of environments whose tasks are the seeds of a game."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

from tidegate.envs.adapters.library import task_seed
from tidegate.envs.base import Environment
from tidegate.envs.rewards import Grade, Reward
from tidegate.types import Message, Task


class Game(Protocol):
    """One game in progress: the state of an episode."""

    def grade(self) -> Grade:
        """Returns the score so far by the library's own rules."""

    def close(self) -> None:
        """Releases what the game holds."""


def score(state: Game) -> Grade:
    """Reward function: the game's score."""
    return state.grade()


class Games(Environment, ABC):
    """Tasks that are seeds: the prompt is the first observation of the game.

    Args:
        id: Name of the game in its library.
        held_out: Number of held-out tasks. Their seeds never occur in training.
        seed: Determines the seeds of the tasks.
        prompt: Template of the prompt, with `{observation}`.
        system: System message before the prompt; empty: none.
    """

    rewards: Sequence[Reward] = (Reward("score", score),)

    def __init__(self, id: str, held_out: int, seed: int, prompt: str, system: str) -> None:
        self._id, self._number, self._seed = id, held_out, seed
        self._prompt, self._system = prompt, system

    @abstractmethod
    def start(self, seed: int) -> tuple[Any, str]:
        """Returns a new game and its first observation, the same for the same seed."""

    def train_task(self, index: int) -> Task:
        return self._task(task_seed(self._seed, "train", index))

    def eval_sets(self) -> Mapping[str, Sequence[Task]]:
        return {"": self._held_out}

    async def setup(self, task: Task) -> Any:
        return self.start(task.info["seed"])[0]

    async def teardown(self, state: Any) -> None:
        state.close()

    def gold_output(self, task: Task) -> str | None:
        return None

    @cached_property
    def _held_out(self) -> list[Task]:
        return [self._task(task_seed(self._seed, "eval", index)) for index in range(self._number)]

    def _task(self, seed: int) -> Task:
        game, observation = self.start(seed)
        game.close()
        return Task(f"{self._id}-{seed}", self.name, self._messages(observation), info={"seed": seed})

    def _messages(self, observation: str) -> list[Message]:
        system = [{"role": "system", "content": self._system}] if self._system else []
        content = self._prompt.replace("{observation}", observation)
        return [*system, {"role": "user", "content": content}]

"""Grades gold answers as if an agent had returned them, to check that the rewards accept them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidegate.envs.base import Environment
from tidegate.errors import ConfigError, RewardError
from tidegate.types import Scored, Task

ENDLESS_TRAIN = 1000
"""Number of training tasks that are graded if the split has no end."""
EXTRACTOR = "extractor/"


@dataclass(frozen=True, slots=True)
class Miss:
    """A gold answer that was not graded as right."""

    task_id: str
    answer: Any
    why: str


@dataclass(slots=True)
class GoldSplit:
    """Result of one split."""

    name: str
    total: int = 0
    misses: list[Miss] = field(default_factory=list)
    extractors: Counter[str] = field(default_factory=Counter)
    """Number of answers that each extractor found."""

    @property
    def right(self) -> int:
        return self.total - len(self.misses)


def grade_gold(environment: Environment, threshold: float = 1.0) -> list[GoldSplit]:
    """Grades every gold answer of every split; an identical task in two splits counts in the first one.

    A reward of at least `threshold` counts as right.

    Raises:
        ConfigError: The environment has no rewards, or one needs the state of an episode.
    """
    if not environment.names:
        raise ConfigError(f"{environment.name}: it has no rewards to grade with")
    rewards = [reward for scorer in environment.rewarders().values() for reward in scorer.rewards]
    if needing := [reward.name for reward in rewards if reward.needs_state]:
        raise ConfigError(
            f"{environment.name}: the reward {needing[0]!r} reads an episode's state, which a gold answer "
            "does not change, so --gold cannot grade it: use tidegate doctor, or tidegate eval without --gold"
        )
    seen: set[str] = set()
    splits = []
    for name, tasks in _splits(environment):
        split = GoldSplit(name)
        for task in tasks:
            if (key := repr(task.to_wire())) not in seen:
                seen.add(key)
                _grade(environment, task, threshold, split)
        if split.total:
            splits.append(split)
    return splits


def _splits(environment: Environment) -> Iterator[tuple[str, Sequence[Task]]]:
    size = environment.train_size()
    name = "train" if size is not None else f"train (first {ENDLESS_TRAIN:,})"
    count = ENDLESS_TRAIN if size is None else size
    yield name, [environment.train_task(index) for index in range(count)]
    for set_name, tasks in environment.eval_sets().items():
        yield set_name or "held-out", tasks


def _grade(environment: Environment, task: Task, threshold: float, split: GoldSplit) -> None:
    split.total += 1
    output = environment.gold_output(task)
    if output is None:
        split.misses.append(Miss(task.id, None, "it has no gold answer"))
        return
    try:
        scored = _scored(environment, task, output)
    except RewardError as error:
        split.misses.append(Miss(task.id, task.answer, str(error)))
        return
    split.extractors.update(
        key.removeprefix(EXTRACTOR)
        for key, value in scored.metrics.items()
        if value and key.startswith(EXTRACTOR)
    )
    if scored.reward < threshold:
        parts = ", ".join(f"{name} {value:g}" for name, value in scored.parts.items())
        unread = "; no answer could be read from it" if scored.metrics.get("unparseable") else ""
        split.misses.append(Miss(task.id, task.answer, f"reward {scored.reward:g} ({parts}){unread}"))


def _scored(environment: Environment, task: Task, output: str) -> Scored:
    """Raises RewardError."""
    messages = [*task.messages, {"role": "assistant", "content": output}]
    scorer, awaited = environment.rewarders().get(task.env, environment), None
    if any(reward.is_async for reward in scorer.rewards):
        awaited = asyncio.run(scorer.await_rewards(task, None, output, messages))
    return environment.score(task, None, output, messages, None, awaited)

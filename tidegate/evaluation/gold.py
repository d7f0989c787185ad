"""Grades gold answers as if an agent had returned them, to check that the rewards accept them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidegate.envs.base import Environment
from tidegate.envs.service.scoring import score
from tidegate.errors import ConfigError, RewardError
from tidegate.types import Message, Scored, Task, fields_of

ENDLESS_TRAIN = 1000
"""Number of training tasks that are graded if the split has no end."""
EXTRACTOR = "extractor/"
SHOWN = 5
"""Misses that are printed."""


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
        ConfigError: The environment has no rewards, or one reads a state that only tools change.
    """
    if not environment.names:
        raise ConfigError(f"{environment.name}: it has no rewards to grade with")
    acting = [scorer for scorer in environment.rewarders().values() if scorer.tools()]
    if needing := [reward.name for scorer in acting for reward in scorer.rewards if reward.needs_state]:
        raise ConfigError(
            f"{environment.name}: the reward {needing[0]!r} reads an episode's state, which a gold answer "
            "does not change, so --gold cannot grade it: use tidegate doctor, or tidegate eval without --gold"
        )
    return asyncio.run(_graded(environment, threshold))


async def _graded(environment: Environment, threshold: float) -> list[GoldSplit]:
    seen: set[str] = set()
    splits = []
    for name, tasks in _splits(environment):
        split = GoldSplit(name)
        for task in tasks:
            if (key := repr(task.to_wire())) not in seen:
                seen.add(key)
                await _grade(environment, task, threshold, split)
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


async def _grade(environment: Environment, task: Task, threshold: float, split: GoldSplit) -> None:
    split.total += 1
    output = environment.gold_output(task)
    if output is None:
        split.misses.append(Miss(task.id, None, "it has no gold answer"))
        return
    messages = [*task.messages, {"role": "assistant", "content": output}]
    try:
        scored = await _score(environment.rewarders().get(task.env, environment), task, output, messages)
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


async def _score(environment: Environment, task: Task, output: str, messages: Sequence[Message]) -> Scored:
    state = await environment.setup(task)
    try:
        return await score(environment, task, None, output, messages, state)
    finally:
        await environment.teardown(state)


def gold_lines(env: str, splits: Sequence[GoldSplit]) -> Iterator[str]:
    """Yields the lines of the gold answers' results; the last line has the totals."""
    yield f"{env}: every gold answer graded as if an agent had returned it"
    for split in splits:
        yield f"  {split.name:<20}{split.right:>8,} of {split.total:,}"
    misses = [miss for split in splits for miss in split.misses]
    for miss in misses[:SHOWN]:
        yield f"  {miss.task_id}: the answer is {str(miss.answer)[:60]!r}; {miss.why}"
    if len(misses) > SHOWN:
        yield f"  and {len(misses) - SHOWN:,} more"
    yield f"{sum(split.right for split in splits):,} of {sum(split.total for split in splits):,}"


def gold_results(env: Mapping[str, Any], splits: Sequence[GoldSplit]) -> dict[str, Any]:
    """Returns the gold answers' results for JSON."""
    return {
        "env": dict(env),
        "right": sum(split.right for split in splits),
        "total": sum(split.total for split in splits),
        "splits": [{"name": split.name, "right": split.right, "total": split.total} for split in splits],
        "extractors": dict(sum((split.extractors for split in splits), Counter[str]())),
        "misses": [fields_of(miss) for split in splits for miss in split.misses],
    }

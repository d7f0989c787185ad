"""The environment `mixture`: several environments, mixed by weight."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, ClassVar

from tidegate.envs.base import Environment, load_environment
from tidegate.envs.rewards import Grade
from tidegate.errors import ConfigError
from tidegate.loading import did_you_mean
from tidegate.types import Message, Scored, Task, Trajectory

CYCLE = 1000
"""Number of training indices over which the shares are exact (to a thousandth)."""
_KEYS = ("use", "options", "weight", "name")


@dataclass(frozen=True, slots=True)
class Part:
    """One environment of a mixture. Its tasks have its name as `env`, so that its rewards score them."""

    name: str
    environment: Environment
    share: int
    """Number of its tasks among CYCLE training tasks."""

    def named(self, task: Task) -> Task:
        return replace(task, id=f"{self.name}/{task.id}", env=self.name)


class Mixture(Environment):
    """Several environments, mixed by weight.

    Each part's tasks are issued in its own order without gaps. The held-out set "" has the parts' main sets
    in the mixture's proportions; each part's sets follow under its name.

    Args:
        parts: Tables `{use, options, weight, name}`: an environment and its options, its share of the
        training tasks (default 1), and a name that distinguishes parts of the same kind.
        seed: Determines the order of the parts.

    Raises:
        ConfigError: A part is invalid, a mixture itself, or not distinguishable by its name.
    """

    name: ClassVar[str] = "mixture"

    def __init__(self, parts: Sequence[Any], seed: int = 0) -> None:
        if not isinstance(parts, list | tuple) or not parts:
            raise ConfigError("mixture: parts must be a list of tables {use, options, weight, name}")
        tables = [_checked(table, number) for number, table in enumerate(parts, 1)]
        environments = [load_environment(table["use"], table.get("options", {})) for table in tables]
        if any(isinstance(environment, Mixture) for environment in environments):
            raise ConfigError("mixture: a part cannot be a mixture; list that mixture's parts instead")
        names = [str(table.get("name", env.name)) for table, env in zip(tables, environments, strict=True)]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"mixture: two parts are named {name!r}; rename one of them")
        shares = _shares([float(table.get("weight", 1.0)) for table in tables])
        self.parts = [Part(*fields) for fields in zip(names, environments, shares, strict=True)]
        self._seed = seed
        self._cycle = functools.lru_cache(maxsize=4)(self._arranged)

    @property
    def names(self) -> Sequence[str]:
        """Names of all parts' rewards; each part scores its own tasks (see `rewarders`)."""
        return [name for part in self.parts for name in part.environment.names]

    def train_task(self, index: int) -> Task:
        cycle, place = divmod(index, CYCLE)
        part, earlier = self._cycle(cycle)[place]
        return part.named(part.environment.train_task(cycle * part.share + earlier))

    def eval_sets(self) -> Mapping[str, Sequence[Task]]:
        sets: dict[str, Sequence[Task]] = {"": list(self._mixed())}
        for part in self.parts:
            for name, tasks in part.environment.eval_sets().items():
                full = f"{part.name}_{name}" if name else part.name
                if full in sets:
                    raise ConfigError(f"mixture: two held-out sets are named {full!r}; rename a part")
                sets[full] = [part.named(task) for task in tasks]
        return sets

    def rewarders(self) -> Mapping[str, Environment]:
        return {part.name: part.environment for part in self.parts}

    @property
    def stateful(self) -> bool:
        return any(part.environment.stateful for part in self.parts)

    def score(
        self,
        task: Task,
        trajectory: Trajectory | None,
        output: str | None,
        messages: Sequence[Message],
        state: Any = None,
        awaited: Mapping[str, Grade] | None = None,
    ) -> Scored:
        return self._part(task).environment.score(task, trajectory, output, messages, state, awaited)

    def gold_output(self, task: Task) -> str | None:
        return self._part(task).environment.gold_output(task)

    def _part(self, task: Task) -> Part:
        return next(part for part in self.parts if part.name == task.env)

    def _arranged(self, cycle: int) -> list[tuple[Part, int]]:
        """Returns a cycle's order: the part of each position, and the number of its earlier tasks."""
        order = [part for part in self.parts for _ in range(part.share)]
        Random(f"mixture/{self._seed}/{cycle}").shuffle(order)
        counts = dict.fromkeys((part.name for part in self.parts), 0)
        arranged = []
        for part in order:
            arranged.append((part, counts[part.name]))
            counts[part.name] += 1
        return arranged

    def _mixed(self) -> Iterator[Task]:
        """Yields the tasks of the parts' main held-out sets once each, in the mixture's order."""
        remaining = {part.name: list(part.environment.eval_sets()[""])[::-1] for part in self.parts}
        cycle = 0
        while any(remaining.values()):
            for part, _ in self._cycle(cycle):
                if remaining[part.name]:
                    yield part.named(remaining[part.name].pop())
            cycle += 1


def _checked(table: Any, number: int) -> Mapping[str, Any]:
    if not isinstance(table, Mapping) or not isinstance(table.get("use"), str):
        raise ConfigError(f"mixture: part {number} needs a 'use': an environment's name or file.py:Name")
    for key in table:
        if key not in _KEYS:
            raise ConfigError(f"mixture: part {number} has no setting {key!r}{did_you_mean(key, _KEYS)}")
    weight = table.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
        raise ConfigError(f"mixture: part {number} has the weight {weight!r}; it must be a number above 0")
    return table


def _shares(weights: Sequence[float]) -> list[int]:
    """Returns integer shares of CYCLE by the largest remainder, at least 1 each."""
    if len(weights) > CYCLE:
        raise ConfigError(f"mixture: {len(weights)} parts; the limit is {CYCLE}")
    total = sum(weights)
    exact = [max(1.0, CYCLE * weight / total) for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda n: shares[n] - exact[n])
    for n in by_remainder[: max(0, CYCLE - sum(shares))]:
        shares[n] += 1
    while sum(shares) > CYCLE:
        shares[shares.index(max(shares))] -= 1
    return shares

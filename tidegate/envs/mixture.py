"""Several environments as one, mixed by weight."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, ClassVar

from tidegate.envs.base import Environment, load_environment
from tidegate.errors import ConfigError
from tidegate.loading import did_you_mean
from tidegate.types import Message, Scored, Task, Trajectory

CYCLE = 1000
"""Training indices over which the shares come out exactly (to a thousandth)."""
_KEYS = ("use", "options", "weight", "name")


@dataclass(frozen=True, slots=True)
class Part:
    """One environment of a mixture; its tasks bear its name, and it alone rewards them."""

    name: str
    environment: Environment
    share: int
    """Of CYCLE training tasks."""

    def named(self, task: Task) -> Task:
        return replace(task, id=f"{self.name}/{task.id}", env=self.name)


class Mixture(Environment):
    """`parts`: tables `{use, options, weight, name}`; `weight` is the share of training tasks, `name` (the
    environment's own, if it is left out) tells two parts of one kind apart. `seed` chooses the order.

    Each part is gone through in its own order without gaps, whatever the other parts are. Held-out sets:
    "" has the parts' main sets in the mixture's proportions; then each part's sets under its name.

    Raises ConfigError.
    """

    name: ClassVar[str] = "mixture"

    def __init__(self, parts: Sequence[Any], seed: int = 0) -> None:
        if not isinstance(parts, list | tuple) or not parts:
            raise ConfigError("mixture: parts is a list of tables {use, options, weight, name}")
        tables = [_checked(one, place) for place, one in enumerate(parts, 1)]
        loaded = [load_environment(one["use"], one.get("options", {})) for one in tables]
        if any(isinstance(one, Mixture) for one in loaded):
            raise ConfigError("mixture: a mixture is no part of another; name its parts here")
        names = [str(one.get("name", env.name)) for one, env in zip(tables, loaded, strict=True)]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"mixture: two parts are called {name!r}; give one of them another name")
        shares = _shares([float(one.get("weight", 1.0)) for one in tables])
        self.parts = [Part(*each) for each in zip(names, loaded, shares, strict=True)]
        self._seed = seed
        self._cycle = functools.lru_cache(maxsize=4)(self._arranged)

    @property
    def names(self) -> Sequence[str]:
        """Every part's rewards; each part scores its own tasks, by `rewarders`."""
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
                    raise ConfigError(f"mixture: two held-out sets are called {full!r}; rename a part")
                sets[full] = [part.named(task) for task in tasks]
        return sets

    def rewarders(self) -> Mapping[str, Environment]:
        return {part.name: part.environment for part in self.parts}

    def score(
        self, task: Task, trajectory: Trajectory | None, output: str | None, messages: Sequence[Message]
    ) -> Scored:
        return self._part(task).environment.score(task, trajectory, output, messages)

    def gold_output(self, task: Task) -> str | None:
        return self._part(task).environment.gold_output(task)

    def _part(self, task: Task) -> Part:
        return next(part for part in self.parts if part.name == task.env)

    def _arranged(self, cycle: int) -> list[tuple[Part, int]]:
        """A cycle's order: the part of each place, and how many of its tasks come before."""
        order = [part for part in self.parts for _ in range(part.share)]
        Random(f"mixture/{self._seed}/{cycle}").shuffle(order)
        counts = dict.fromkeys((part.name for part in self.parts), 0)
        arranged = []
        for part in order:
            arranged.append((part, counts[part.name]))
            counts[part.name] += 1
        return arranged

    def _mixed(self) -> Iterator[Task]:
        """The parts' main held-out sets, each task once; a part that has ended is passed over."""
        waiting = {part.name: list(part.environment.eval_sets()[""])[::-1] for part in self.parts}
        cycle = 0
        while any(waiting.values()):
            for part, _ in self._cycle(cycle):
                if waiting[part.name]:
                    yield part.named(waiting[part.name].pop())
            cycle += 1


def _checked(table: Any, place: int) -> Mapping[str, Any]:
    if not isinstance(table, Mapping) or not isinstance(table.get("use"), str):
        raise ConfigError(f"mixture: part {place} needs a 'use': an environment's name or file.py:Name")
    for key in table:
        if key not in _KEYS:
            raise ConfigError(f"mixture: part {place} has no setting {key!r}{did_you_mean(key, _KEYS)}")
    weight = table.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
        raise ConfigError(f"mixture: part {place} has the weight {weight!r}; it must be a number above 0")
    return table


def _shares(weights: Sequence[float]) -> list[int]:
    """Whole shares of CYCLE by the largest remainder, at least 1 each."""
    if len(weights) > CYCLE:
        raise ConfigError(f"mixture: {len(weights)} parts; more than {CYCLE} cannot be mixed")
    total = sum(weights)
    exact = [max(1.0, CYCLE * weight / total) for weight in weights]
    shares = [int(one) for one in exact]
    by_remainder = sorted(range(len(exact)), key=lambda n: shares[n] - exact[n])
    for n in by_remainder[: max(0, CYCLE - sum(shares))]:
        shares[n] += 1
    while sum(shares) > CYCLE:
        shares[shares.index(max(shares))] -= 1
    return shares

"""Base class of environments with a finite number of tasks."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from random import Random

from tidegate.envs.base import Environment
from tidegate.types import Task


class Finite(Environment):
    """Issues its tasks epoch by epoch, each in a different order that the seed determines.

    The constructor of a subclass calls `_set_tasks` once.
    """

    def _set_tasks(self, train: Sequence[Task], held_out: Mapping[str, Sequence[Task]], seed: int) -> None:
        self._train = train
        self._held_out = held_out
        self._seed = seed
        self._order = functools.lru_cache(maxsize=2)(self._shuffled)

    def train_task(self, index: int) -> Task:
        epoch, position = divmod(index, len(self._train))
        return self._train[self._order(epoch)[position]]

    def train_size(self) -> int:
        return len(self._train)

    def eval_sets(self) -> Mapping[str, Sequence[Task]]:
        return self._held_out

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self._train)))
        Random(f"order/{self._seed}/{epoch}").shuffle(order)
        return order

"""Base class of environments with a finite number of tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tidegate.envs.base import Environment
from tidegate.envs.datasets.shuffle import EpochShuffle
from tidegate.types import Task


class Finite(Environment):
    """Issues its tasks epoch by epoch, each in a different order that the seed determines.

    The constructor of a subclass calls `_set_tasks` once.
    """

    def _set_tasks(self, train: Sequence[Task], held_out: Mapping[str, Sequence[Task]], seed: int) -> None:
        self._train = train
        self._held_out = held_out
        self._order = EpochShuffle(len(train), seed)

    def train_task(self, index: int) -> Task:
        return self._train[self._order[index]]

    def train_size(self) -> int:
        return len(self._train)

    def eval_sets(self) -> Mapping[str, Sequence[Task]]:
        return self._held_out

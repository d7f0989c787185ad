"""An environment of so many tasks, however they came to be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tidegate.envs.base import Environment
from tidegate.envs.datasets.shuffle import EpochShuffle
from tidegate.types import Task


class Finite(Environment):
    """Trained on epoch after epoch, each in an order of its own that the seed alone determines.

    A subclass calls `_hold` once, when it is made.
    """

    def _hold(self, train: Sequence[Task], held_out: Mapping[str, Sequence[Task]], seed: int) -> None:
        self._train = train
        self._held_out = held_out
        self._order = EpochShuffle(len(train), seed)

    def train_task(self, index: int) -> Task:
        return self._train[self._order[index]]

    def train_size(self) -> int:
        return len(self._train)

    def eval_sets(self) -> Mapping[str, Sequence[Task]]:
        return self._held_out

"""Training order of a finite set of rows."""

from __future__ import annotations

import functools
from random import Random


class EpochShuffle:
    """Endless order of rows: each epoch is a different permutation, determined by the seed."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self._seed = seed
        self._epoch = functools.lru_cache(maxsize=2)(self._shuffled)

    def __getitem__(self, index: int) -> int:
        """Returns the row (0 to size − 1) of training index `index` ≥ 0."""
        epoch, position = divmod(index, self.size)
        return self._epoch(epoch)[position]

    def _shuffled(self, epoch: int) -> list[int]:
        rows = list(range(self.size))
        Random(f"order/{self._seed}/{epoch}").shuffle(rows)
        return rows

"""In which order a finite set of rows is trained on."""

from __future__ import annotations

import functools
from random import Random


class EpochShuffle:
    """Epoch after epoch, each a permutation of its own that the seed alone determines."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self._seed = seed
        self._epoch = functools.lru_cache(maxsize=2)(self._shuffled)

    def __getitem__(self, index: int) -> int:
        """The row (0 to size − 1) that training index `index` ≥ 0 stands for."""
        epoch, place = divmod(index, self.size)
        return self._epoch(epoch)[place]

    def _shuffled(self, epoch: int) -> list[int]:
        rows = list(range(self.size))
        Random(f"order/{self._seed}/{epoch}").shuffle(rows)
        return rows

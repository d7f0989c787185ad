"""The rows of the running batch: row `r` of every array belongs to the request in `owners[r]`.

Rows 0..n-1 are in use, without a hole: the last row moves into one that is freed, so that a decode
step takes views of the key-value cache and gathers nothing.
"""

from __future__ import annotations

import numpy as np

from tidegate.engine.requests.request import Generation


class Slots:
    """Arrays of shape [max_slots]; `lengths` counts the tokens whose keys and values are cached,
    which is also the position of the next input token, `tokens`."""

    def __init__(self, max_slots: int) -> None:
        self.max_slots = max_slots
        self.owners: list[Generation] = []
        self.tokens = np.zeros(max_slots, np.int64)
        self.lengths = np.zeros(max_slots, np.int64)
        self.drawn = np.zeros(max_slots, np.uint64)
        self.seeds = np.zeros(max_slots, np.uint64)
        self.temperatures = np.ones(max_slots, np.float32)
        self.top_ps = np.ones(max_slots, np.float32)
        self.top_ks = np.zeros(max_slots, np.int64)
        self.min_ps = np.zeros(max_slots, np.float32)
        self.adjusted = np.zeros(max_slots, bool)
        """Whose logits are changed before anything else: by penalties or a grammar."""
        self.choices = np.zeros(max_slots, np.int64)
        """Of rows with a grammar: how many ids it left to choose from in this step."""
        self.masses = np.zeros(max_slots, np.float64)
        """For rows with a grammar: the probability of those ids before the grammar excluded the others."""
        self._arrays: list[np.ndarray] = [
            self.tokens,
            self.lengths,
            self.drawn,
            self.seeds,
            self.temperatures,
        ]
        self._arrays += [self.top_ps, self.top_ks, self.min_ps, self.adjusted]

    @property
    def count(self) -> int:
        return len(self.owners)

    @property
    def free(self) -> int:
        return self.max_slots - len(self.owners)

    def join(self, generation: Generation) -> int:
        """Give a request the next row; its cache must hold all of its tokens but the last."""
        row = len(self.owners)
        params = generation.params
        self.owners.append(generation)
        self.tokens[row] = (generation.output_ids or generation.prompt_ids)[-1]
        self.lengths[row] = len(generation.prompt_ids) + len(generation.output_ids) - 1
        self.drawn[row] = len(generation.output_ids)
        self.seeds[row] = params.seed
        self.temperatures[row] = params.temperature
        self.top_ps[row] = params.top_p
        self.top_ks[row] = max(params.top_k, 0)
        self.min_ps[row] = params.min_p
        self.adjusted[row] = params.penalised or generation.grammar is not None
        return row

    def advance(self, ids: np.ndarray) -> None:
        """Every row sampled one token; ids: [n]."""
        n = len(self.owners)
        self.tokens[:n] = ids
        self.lengths[:n] += 1
        self.drawn[:n] += np.uint64(1)

    def leave(self, row: int) -> int:
        """Free a row. Returns the row that moved into it (`row` itself: none had to)."""
        last = len(self.owners) - 1
        if row != last:
            self.owners[row] = self.owners[last]
            for array in self._arrays:
                array[row] = array[last]
        self.owners.pop()
        return last

    def clear(self) -> list[Generation]:
        """Free all rows; returns who held them."""
        owners, self.owners = self.owners, []
        return owners

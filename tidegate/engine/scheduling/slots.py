"""Rows of the running batch: row `r` of every array belongs to the request `owners[r]`.

Rows 0..n-1 are in use. When a row is freed, the last row moves into it, so that a decode step uses views of
the key-value cache and needs no gather.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tidegate.engine.requests.request import Generation
from tidegate.types import LISTED


class Slots:
    """Arrays of shape [max_slots]. `lengths` are the numbers of cached tokens, which are also the positions
    of the next input tokens, `tokens`."""

    def __init__(self, max_slots: int) -> None:
        self.max_slots = max_slots
        self.owners: list[Generation] = []
        self.tokens = np.zeros(max_slots, np.int64)
        self.lengths = np.zeros(max_slots, np.int64)
        self.output_counts = np.zeros(max_slots, np.uint64)
        self.seeds = np.zeros(max_slots, np.uint64)
        self.temperatures = np.ones(max_slots, np.float32)
        self.top_ps = np.ones(max_slots, np.float32)
        self.top_ks = np.zeros(max_slots, np.int64)
        self.min_ps = np.zeros(max_slots, np.float32)
        self.listed = np.zeros(max_slots, np.int64)
        """Numbers of likeliest ids that are requested in place of each token."""
        self.top: npt.NDArray[np.void] = np.empty((0, 0), LISTED)
        """These ids of each row in this step, likeliest first; more if another row requests more."""
        self.masked = np.zeros(max_slots, bool)
        """Whether the ids that top-k, top-p and min-p keep are requested."""
        self.kept: dict[int, tuple[float, list[int]]] = {}
        """For these rows: the token's logprob among the kept ids in this step, and these ids."""
        self.has_processors = np.zeros(max_slots, bool)
        """Whether penalties or a grammar change the logits."""
        self.choices = np.zeros(max_slots, np.int64)
        """For rows with a grammar: number of ids that it allows in this step."""
        self.masses = np.zeros(max_slots, np.float64)
        """For rows with a grammar: total probability of these ids before the grammar excluded the others."""
        self._arrays: list[np.ndarray] = [
            self.tokens, self.lengths, self.output_counts, self.seeds, self.temperatures,
            self.top_ps, self.top_ks, self.min_ps, self.listed, self.masked, self.has_processors,
        ]  # fmt: skip

    @property
    def count(self) -> int:
        return len(self.owners)

    @property
    def free(self) -> int:
        return self.max_slots - len(self.owners)

    def add(self, generation: Generation) -> int:
        row = len(self.owners)
        params = generation.params
        self.owners.append(generation)
        # The last token is the input of the next step, so prefill leaves it out and `lengths` is one
        # less. After a retraction it is the last sampled token, not the prompt's.
        self.tokens[row] = (generation.output_ids or generation.prompt_ids)[-1]
        self.lengths[row] = len(generation.prompt_ids) + len(generation.output_ids) - 1
        # Not 0 after a retraction: random numbers are drawn by seed and count, and would repeat.
        self.output_counts[row] = len(generation.output_ids)
        self.seeds[row] = params.seed
        self.temperatures[row] = params.temperature
        self.top_ps[row] = params.top_p
        self.top_ks[row] = max(params.top_k, 0)
        self.min_ps[row] = params.min_p
        self.listed[row] = generation.top_logprobs
        self.masked[row] = generation.sampling_mask
        self.has_processors[row] = params.penalised or generation.grammar is not None
        return row

    def advance(self, ids: np.ndarray) -> None:
        n = len(self.owners)
        self.tokens[:n] = ids
        self.lengths[:n] += 1
        self.output_counts[:n] += np.uint64(1)

    def remove(self, row: int) -> int:
        """Frees a row. Returns the row that moved into it, or `row` if none did."""
        last = len(self.owners) - 1
        if row != last:
            self.owners[row] = self.owners[last]
            for array in self._arrays:
                array[row] = array[last]
        self.owners.pop()
        return last

    def clear(self) -> list[Generation]:
        owners, self.owners = self.owners, []
        return owners

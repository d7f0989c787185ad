"""The running batch: which request holds which row, and what of it need not be computed again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from tidegate.engine.prefix import BLOCK, PrefixStore
from tidegate.engine.requests import Generation
from tidegate.engine.slots import Slots

PREFILL_TOKENS = 4096
"""Padded tokens of one prefill pass; bounds memory, and how long running requests stand still."""


class Decoder(Protocol):
    """What the engine asks of a model; `tidegate.engine.model.Model` is the one there is."""

    def prefill(self, first: int, sequences: Sequence[Sequence[int]], held: Sequence[int]) -> None: ...
    def decode(self, slots: Slots) -> tuple[np.ndarray, np.ndarray]: ...
    def move(self, source: int, target: int, length: int) -> None: ...
    def snapshot(self, row: int, length: int) -> Any: ...
    def restore(self, row: int, snapshot: Any, length: int) -> None: ...
    def clean(self, row: int) -> None: ...
    def drop_cache(self) -> None: ...
    def copy_weights(self, weights: Any) -> None: ...


class Rows:
    """Rows, their key-value cache, and the prefix cache behind it. Used by one thread."""

    def __init__(self, model: Decoder, max_slots: int, prefix_bytes: int) -> None:
        self.model = model
        self.slots = Slots(max_slots)
        self.prefixes = PrefixStore(prefix_bytes)
        self.tokens_prefilled = 0
        self.tokens_reused = 0

    @property
    def owners(self) -> list[Generation]:
        return self.slots.owners

    @property
    def count(self) -> int:
        return self.slots.count

    @property
    def free(self) -> int:
        return self.slots.free

    def choose(self, waiting: Iterable[Generation]) -> list[Generation]:
        """Those to prefill next, in one pass: with about as much to compute, and nothing in common."""
        todo = sorted(((*self._uncached(one), one) for one in waiting), key=lambda each: each[0])
        cheapest = todo[0][0]
        batch: list[Generation] = []
        begun: set[int] = set()
        for cost, block, generation in todo:
            if batch and (cost * (len(batch) + 1) > PREFILL_TOKENS or cost > 1.5 * cheapest + 16):
                break
            if block in begun:
                continue  # it begins like one of this batch, and will find that computed
            if block is not None:
                begun.add(block)
            batch.append(generation)
        return batch

    def fill(self, batch: Sequence[Generation]) -> None:
        """Give each its row, and cache all of its tokens but the last."""
        first = self.slots.count
        pasts = [generation.past for generation in batch]
        held = []
        for row, (generation, past) in enumerate(zip(batch, pasts, strict=True), first):
            length, snapshot = self.prefixes.find(past, generation.chain.upto(past))
            if snapshot is not None:
                self.model.restore(row, snapshot, length)
            held.append(length)
        fresh = [past[length:] for past, length in zip(pasts, held, strict=True)]
        if any(fresh):
            # Where nothing is left to compute, a token is written that the next step overwrites.
            self.model.prefill(first, [ids or [0] for ids in fresh], held)
        for generation, length in zip(batch, held, strict=True):
            row = self.slots.join(generation)
            if not generation.output_ids:
                generation.cached_tokens = length
            self.remember(row)
        self.tokens_prefilled += sum(map(len, fresh))
        self.tokens_reused += sum(held)

    def sample(self) -> tuple[np.ndarray, np.ndarray]:
        """One token for every row: (ids, logprobs), both [rows]."""
        ids, logprobs = self.model.decode(self.slots)
        self.slots.advance(ids)
        return ids, logprobs

    def remember(self, row: int) -> None:
        """Keep a row's keys and values for sequences that begin like it."""
        generation = self.slots.owners[row]
        if self.prefixes.max_bytes == 0 or generation.kv_version is not None:
            return
        past = generation.past
        hashes = generation.chain.upto(past)
        if not self.prefixes.holds(hashes):
            self.prefixes.add(past, hashes, self.model.snapshot(row, len(hashes) * BLOCK))

    def poisoned(self, row: int) -> None:
        """A row holds values that are not finite: no other sequence may come upon them."""
        self.model.clean(row)
        self.prefixes.clear()

    def leave(self, row: int) -> None:
        moved = self.slots.leave(row)
        if moved != row:
            self.model.move(moved, row, int(self.slots.lengths[row]))

    def clear(self) -> list[Generation]:
        """Free all rows; returns who held them."""
        return self.slots.clear()

    def forget(self) -> None:
        """Drop everything cached."""
        self.prefixes.clear()
        self.model.drop_cache()

    def _uncached(self, generation: Generation) -> tuple[int, int | None]:
        """Tokens that its prefill has to compute, and the first block of them that could be shared."""
        past = generation.past
        hashes = generation.chain.upto(past)
        length, _ = self.prefixes.find(past, hashes)
        blocks = length // BLOCK
        share = self.prefixes.max_bytes > 0 and blocks < len(hashes)
        return len(past) - length, hashes[blocks] if share else None

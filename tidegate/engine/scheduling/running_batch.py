"""The running batch: which request holds which row, and what of it need not be computed again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tidegate.engine.requests.block_hashes import BLOCK
from tidegate.engine.requests.request import Generation
from tidegate.engine.scheduling.prefix_cache import PrefixStore
from tidegate.engine.scheduling.slots import Slots

PASS_TOKENS = 4096
"""Padded tokens of one prefill pass while nothing decodes; bounds its memory."""
CHUNK_TOKENS = 512
"""The same while requests decode: between two of their tokens stands at most one such pass. It may have
more, up to PASS_TOKENS, where more requests wait for it than it keeps waiting."""


class Decoder(Protocol):
    """What the engine asks of a model; `tidegate.engine.model.model.Model` is the one there is."""

    def prefill(self, first: int, sequences: Sequence[Sequence[int]], held: Sequence[int]) -> None: ...
    def decode(self, slots: Slots) -> tuple[np.ndarray, np.ndarray]: ...
    def move(self, source: int, target: int, length: int) -> None: ...
    def snapshot(self, row: int, length: int) -> Any: ...
    def restore(self, row: int, snapshot: Any, length: int) -> None: ...
    def clean(self, row: int) -> None: ...
    def drop_cache(self) -> None: ...
    def copy_weights(self, weights: Any) -> None: ...


@dataclass(slots=True)
class _PartialPrefill:
    """A request that is being prefilled in the row after the running ones: `done` tokens are cached,
    `reused` of which were found."""

    generation: Generation
    reused: int
    done: int


class RunningBatch:
    """Rows, their key-value cache, and the prefix cache behind it. Used by one thread."""

    def __init__(self, model: Decoder, max_slots: int, prefix_bytes: int) -> None:
        self.model = model
        self.slots = Slots(max_slots)
        self.prefixes = PrefixStore(prefix_bytes)
        self.tokens_prefilled = 0
        self.tokens_reused = 0
        self._begun: _PartialPrefill | None = None

    @property
    def owners(self) -> list[Generation]:
        return self.slots.owners

    @property
    def count(self) -> int:
        return self.slots.count

    @property
    def free(self) -> int:
        return self.slots.free

    def budget(self, joining: int) -> int:
        """Padded tokens that a prefill pass for so many requests may have."""
        if not self.count:
            return PASS_TOKENS
        return min(PASS_TOKENS, max(CHUNK_TOKENS, CHUNK_TOKENS * joining // self.count))

    def choose(self, waiting: Iterable[Generation]) -> list[Generation]:
        """Whom to prefill next, in one pass: the first, and those with about as much to compute and
        nothing in common. A long prompt goes alone, pass after pass until it is done."""
        if self._begun is not None:
            return [self._begun.generation]
        todo = [(*self._uncached(one), one) for one in waiting]
        first = todo[0][0]
        alike = (each for each in todo if first <= 1.5 * each[0] + 16 and each[0] <= 1.5 * first + 16)
        batch: list[Generation] = []
        longest = 0
        shared: set[int] = set()
        for cost, block, generation in alike:
            longest = max(longest, cost)
            if batch and longest * (len(batch) + 1) > self.budget(len(batch) + 1):
                break
            if block in shared:
                continue  # it begins like one of this batch, and will find that computed
            if block is not None:
                shared.add(block)
            batch.append(generation)
        return batch

    def fill(self, batch: Sequence[Generation]) -> list[Generation]:
        """Cache the tokens of these requests, all but their last; returns those that have a row now.

        One that goes alone may have more to compute than a pass has room for: then it has none yet.
        """
        budget = self.budget(len(batch))
        first = self.slots.count
        begun = [self._begin(row, generation) for row, generation in enumerate(batch, first)]
        chunks = [one.generation.past[one.done : one.done + budget] for one in begun]
        if any(chunks):
            # Where nothing is left to compute, a token is written that the next step overwrites.
            self.model.prefill(first, [ids or [0] for ids in chunks], [one.done for one in begun])
        for one, chunk in zip(begun, chunks, strict=True):
            one.done += len(chunk)
        self.tokens_prefilled += sum(map(len, chunks))
        if begun[0].done < len(begun[0].generation.past):
            self._begun = begun[0]
            return []
        self._begun = None
        for one in begun:
            row = self.slots.join(one.generation)
            if not one.generation.output_ids:
                one.generation.cached_tokens = one.reused
            self.tokens_reused += one.reused
            self.remember(row)
        return list(batch)

    def _begin(self, row: int, generation: Generation) -> _PartialPrefill:
        if self._begun is not None and self._begun.generation is generation:
            return self._begun
        past = generation.past
        length, snapshot = self.prefixes.find(past, generation.chain.upto(past))
        if snapshot is not None:
            self.model.restore(row, snapshot, length)
        return _PartialPrefill(generation, length, length)

    def abandon(self, generation: Generation) -> None:
        """It will not be prefilled to its end."""
        if self._begun is not None and self._begun.generation is generation:
            self._begun = None

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
        if self._begun is not None:
            self.model.move(moved + 1, moved, self._begun.done)

    def clear(self) -> list[Generation]:
        """Free all rows; returns who held them."""
        self._begun = None
        return self.slots.clear()

    def outdate(self) -> None:
        """Nothing new is built upon what is cached: it is of another version."""
        self._begun = None
        self.prefixes.clear()

    def forget(self) -> None:
        """Drop everything cached."""
        self.outdate()
        self.model.drop_cache()

    def _uncached(self, generation: Generation) -> tuple[int, int | None]:
        """Tokens that its prefill has to compute, and the first block of them that could be shared."""
        past = generation.past
        hashes = generation.chain.upto(past)
        length, _ = self.prefixes.find(past, hashes)
        blocks = length // BLOCK
        share = self.prefixes.max_bytes > 0 and blocks < len(hashes)
        return len(past) - length, hashes[blocks] if share else None

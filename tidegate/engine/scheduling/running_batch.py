"""The running batch: assigns rows to requests and reuses cached prefixes."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tidegate.engine.requests.request import BLOCK, Generation, PromptScores
from tidegate.engine.scheduling.prefix_cache import PrefixStore
from tidegate.engine.scheduling.slots import Slots

log = logging.getLogger(__name__)

PASS_TOKENS = 4096
"""Maximum padded tokens of a prefill pass while no request decodes; bounds its memory."""
CHUNK_TOKENS = 512
"""The same while requests decode: at most one such pass runs between two of their tokens. The limit rises, up
to PASS_TOKENS, if more requests wait for the pass than are being decoded."""


class KVCache(Protocol):
    def move(self, source: int, target: int, length: int) -> None: ...
    def snapshot(self, row: int, length: int) -> Any: ...
    def restore(self, row: int, snapshot: Any, length: int) -> None: ...
    def zero_row(self, row: int) -> None: ...
    def experts(self, row: int, start: int, end: int) -> np.ndarray: ...
    def drop(self) -> None: ...


class Decoder(Protocol):
    """Interface of the model, which `tidegate.engine.model.model.Model` implements."""

    @property
    def cache(self) -> KVCache: ...
    @property
    def max_scored_tokens(self) -> int:
        """Maximum padded tokens of a `score` pass."""

    def prefill(
        self,
        first: int,
        sequences: Sequence[Sequence[int]],
        held: Sequence[int],
        adapters: Sequence[str] = (),
    ) -> None: ...
    def score(
        self,
        first: int,
        sequences: Sequence[Sequence[int]],
        held: Sequence[int],
        targets: Sequence[Sequence[int]],
        top: int = 0,
        adapters: Sequence[str] = (),
    ) -> list[PromptScores]: ...
    def decode(self, slots: Slots) -> tuple[np.ndarray, np.ndarray]: ...
    def serves(self, adapter: str) -> bool: ...
    def copy_weights(self, weights: Any) -> None: ...


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    tokens_sampled: int = 0
    requests: int = 0
    steps: int = 0
    retractions: int = 0
    tokens_prefilled: int = 0
    tokens_reused: int = 0


@dataclass(slots=True)
class _PartialPrefill:
    """A request that is being prefilled in the row after the running ones: `done` tokens are cached, of which
    `reused` are from the prefix cache."""

    generation: Generation
    reused: int
    done: int


class RunningBatch:
    """The rows, their key-value cache and the prefix cache. Used by one thread."""

    def __init__(self, model: Decoder, max_slots: int, prefix_bytes: int) -> None:
        self.model = model
        self.slots = Slots(max_slots)
        self.prefixes = PrefixStore(prefix_bytes)
        self.counters = Counters()
        self._partial: _PartialPrefill | None = None

    @property
    def owners(self) -> list[Generation]:
        return self.slots.owners

    @property
    def count(self) -> int:
        return self.slots.count

    def budget(self, joining: int, scored: bool = False) -> int:
        """Returns the maximum padded tokens of a prefill pass for `joining` requests; `scored`: with logprobs
        of their prompts."""
        limit = min(PASS_TOKENS, self.model.max_scored_tokens) if scored else PASS_TOKENS
        # No decoding request waits for this pass, so only memory limits it.
        if not self.count:
            return limit
        return min(limit, max(CHUNK_TOKENS, CHUNK_TOKENS * joining // self.count))

    def choose(self, waiting: Iterable[Generation]) -> list[Generation]:
        """Selects the requests of the next prefill pass: the first and others of its kind and about its cost
        that share no uncached prefix. A prompt longer than a pass is prefilled alone, in several passes."""
        # The row after the running ones holds its values, and any other prefill would overwrite them.
        if self._partial is not None:
            return [self._partial.generation]
        costs = [(*self._uncached(generation), generation) for generation in waiting]
        first, kind = costs[0][0], costs[0][2].prefill_kind
        similar = (
            item
            for item in costs
            # Sequences of a pass are padded to the longest, so their costs must be similar; the 16 tokens
            # let short prompts share a pass although they differ by more than half.
            if first <= 1.5 * item[0] + 16 and item[0] <= 1.5 * first + 16 and item[2].prefill_kind == kind
        )
        batch: list[Generation] = []
        longest = 0
        shared: set[int] = set()
        for cost, block, generation in similar:
            longest = max(longest, cost)
            if batch and longest * (len(batch) + 1) > self.budget(len(batch) + 1, kind[0]):
                break
            if block in shared:
                continue  # it can reuse the prefix once this batch has computed it
            if block is not None:
                shared.add(block)
            batch.append(generation)
        return batch

    def fill(self, batch: Sequence[Generation]) -> list[Generation]:
        """Prefills all tokens of these requests but their last; returns the requests that now have a row, or
        need none.

        A single request that exceeds the limit of a pass is prefilled in part and has no row yet.
        """
        budget = self.budget(len(batch), batch[0].needs_prompt_logprobs)
        first = self.slots.count
        partials = [self._start_prefill(row, generation) for row, generation in enumerate(batch, first)]
        chunks = [partial.generation.past[partial.done : partial.done + budget] for partial in partials]
        if any(chunks):
            self._prefill(first, partials, chunks)
        for partial, chunk in zip(partials, chunks, strict=True):
            partial.done += len(chunk)
        self.counters.tokens_prefilled += sum(map(len, chunks))
        if partials[0].done < len(partials[0].generation.past):
            self._partial = partials[0]
            return []
        self._partial = None
        for row, partial in enumerate(partials, first):
            generation = partial.generation
            # A retracted request prefills again: its first prefill counts as the session's cache hit.
            if not generation.output_ids:
                generation.cached_tokens = partial.reused
            self.counters.tokens_reused += partial.reused
            if generation.limit:
                self.slots.add(generation)
            # It gets no row, so no step would find these values later; they must not become a prefix.
            elif not all(map(math.isfinite, generation.prompt_logprobs)):
                self.discard_values(row)
                continue
            past = generation.past
            self._cache_prefix(row, generation, past, generation.block_hashes.with_rest(past))
        return list(batch)

    def _prefill(
        self, first: int, partials: Sequence[_PartialPrefill], chunks: Sequence[Sequence[int]]
    ) -> None:
        """Caches the chunks in rows first.., and adds the logprobs that were requested."""
        # An empty chunk is replaced by one token, which the next step overwrites.
        sequences, held = [ids or [0] for ids in chunks], [partial.done for partial in partials]
        targets = [_targets(*pair) for pair in zip(partials, chunks, strict=True)]
        adapters = [partial.generation.adapter for partial in partials]
        if not any(targets):
            self.model.prefill(first, sequences, held, adapters)
            return
        top = partials[0].generation.top_logprobs  # the same in all requests of a pass
        scores = self.model.score(first, sequences, held, targets, top, adapters)
        for partial, values in zip(partials, scores, strict=True):
            partial.generation.prompt_logprobs += values.logprobs
            partial.generation.prompt_top += values.top

    def _start_prefill(self, row: int, generation: Generation) -> _PartialPrefill:
        if self._partial is not None and self._partial.generation is generation:
            return self._partial
        if generation.needs_prompt_logprobs:
            generation.prompt_logprobs, generation.prompt_top = (
                [],
                [],
            )  # a part of them may be of other weights
        reusable = generation.reusable
        length, snapshot = self.prefixes.find(reusable, generation.block_hashes.with_rest(reusable))
        cached = 0
        if snapshot is not None:
            with self._emptied_on_failure():
                self.model.cache.restore(row, snapshot, length)
                cached = length
        return _PartialPrefill(generation, cached, cached)

    def cancel_prefill(self, generation: Generation) -> None:
        if self._partial is not None and self._partial.generation is generation:
            self._partial = None

    def sample(self) -> tuple[np.ndarray, np.ndarray]:
        ids, logprobs = self.model.decode(self.slots)
        self.slots.advance(ids)
        return ids, logprobs

    def cache_prefix(self, row: int) -> None:
        """Caches the whole blocks of a sequence, with which the session's next prompt begins."""
        generation = self.slots.owners[row]
        past = generation.past
        self._cache_prefix(row, generation, past, generation.block_hashes.for_tokens(past))

    def _cache_prefix(
        self, row: int, generation: Generation, past: Sequence[int], hashes: Sequence[int]
    ) -> None:
        # With `kv_version` its values come from more than one version, and a prefix has exactly one.
        if self.prefixes.max_bytes == 0 or generation.kv_version is not None or self.prefixes.holds(hashes):
            return
        with self._emptied_on_failure():  # the request has its row already, and needs no copy
            length = min(len(hashes) * BLOCK, len(past))
            self.prefixes.add(past, hashes, self.model.cache.snapshot(row, length))

    @contextlib.contextmanager
    def _emptied_on_failure(self) -> Iterator[None]:
        """Empties the prefix cache if a copy to or from it fails; requests go on without it."""
        try:
            yield
        except Exception:
            log.warning("a copy for the prefix cache failed; the cache is emptied", exc_info=True)
            self.prefixes.clear()

    def collect_experts(self, row: int) -> None:
        """Adds the experts of a row's tokens to its request, before the row is freed."""
        generation = self.slots.owners[row]
        if generation.experts_start is None:
            return
        start = generation.experts_start + sum(map(len, generation.experts))
        if start < (end := len(generation.past)):
            generation.experts.append(self.model.cache.experts(row, start, end))

    def discard_values(self, row: int) -> None:
        """Removes a row's values, which are not finite, so that no other sequence reads them."""
        self.model.cache.zero_row(row)
        # A prefix may hold them: it is copied after prefill, before the first logits of the row show the
        # fault.
        self.prefixes.clear()

    def remove(self, row: int) -> None:
        """Frees a row; the last row moves into it."""
        moved = self.slots.remove(row)
        length = int(self.slots.lengths[row])
        if moved != row and length:  # a prompt of one token has nothing in the cache before its first step
            self.model.cache.move(moved, row, length)
        # It stays in the row after the running ones, of which there is one fewer now.
        if self._partial is not None:
            self.model.cache.move(moved + 1, moved, self._partial.done)

    def clear(self) -> list[Generation]:
        self._partial = None
        return self.slots.clear()

    def invalidate_prefixes(self) -> None:
        """Drops prefixes and the partial prefill, which belong to another version of the weights."""
        self._partial = None
        self.prefixes.clear()

    def drop_cache(self) -> None:
        self.invalidate_prefixes()
        self.model.cache.drop()

    def _uncached(self, generation: Generation) -> tuple[int, int | None]:
        """Returns the number of tokens to prefill and the hash of their first block that can be shared."""
        reusable = generation.reusable
        hashes = generation.block_hashes.with_rest(reusable)
        length, _ = self.prefixes.find(reusable, hashes)
        share = self.prefixes.max_bytes > 0 and length < len(reusable)
        return len(generation.past) - length, hashes[length // BLOCK] if share else None


def _targets(partial: _PartialPrefill, chunk: Sequence[int]) -> list[int]:
    """Returns the prompt's tokens that follow tokens of the chunk and whose logprobs are requested."""
    generation, end = partial.generation, partial.done + len(chunk)
    if not generation.needs_prompt_logprobs or generation.logprob_start is None:
        return []
    return generation.prompt_ids[max(partial.done, generation.logprob_start) + 1 : end + 1]

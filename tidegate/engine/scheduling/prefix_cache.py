"""Prefix cache: keys and values of finished and prefilled sequences, indexed by their tokens.

A turn's prompt begins with the previous turn, and the sessions of a group begin with the same prompt: their
shared prefix is computed once. Sequences are matched by hashes of whole blocks of tokens (as in vLLM) and
then token by token, so that a hash collision is only a miss. A prompt has a hash of all its tokens, too: the
other requests of its group find all of it.

All entries belong to one version of the weights; the scheduler clears the cache when the weights change.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tidegate.engine.requests.request import BLOCK


class Snapshot(Protocol):
    @property
    def nbytes(self) -> int: ...


@dataclass(slots=True, eq=False)
class _CachedPrefix:
    tokens: list[int]
    snapshot: Snapshot
    rest: int | None
    """The hash of all its tokens, if they end within a block."""
    blocks: set[int] = field(default_factory=set)
    """The block hashes whose index entry this is."""


class PrefixStore:
    """LRU cache of at most `max_bytes`; 0 disables it."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        self._entries: OrderedDict[int, _CachedPrefix] = OrderedDict()
        self._index: dict[int, _CachedPrefix] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, tokens: Sequence[int], hashes: Sequence[int]) -> tuple[int, Snapshot | None]:
        """Returns the number of cached leading tokens (all, or a multiple of BLOCK) and their snapshot."""
        for blocks in range(len(hashes), 0, -1):
            entry = self._index.get(hashes[blocks - 1])
            length = min(blocks * BLOCK, len(tokens))
            # Python's `hash` of ids is no proof: a collision would continue another sequence's values.
            if entry is not None and entry.tokens[:length] == tokens[:length]:
                self._entries.move_to_end(id(entry))
                return length, entry.snapshot
        return 0, None

    def holds(self, hashes: Sequence[int]) -> bool:
        return not hashes or hashes[-1] in self._index

    def add(self, tokens: Sequence[int], hashes: Sequence[int], snapshot: Snapshot) -> None:
        """Adds a sequence and removes entries that are prefixes of it."""
        if snapshot.nbytes > self.max_bytes:
            return
        covered = len(hashes) * BLOCK
        entry = _CachedPrefix(list(tokens[:covered]), snapshot, hashes[-1] if covered > len(tokens) else None)
        self._entries[id(entry)] = entry
        self.used_bytes += snapshot.nbytes
        for block_hash in hashes:
            former = self._index.get(block_hash)
            if former is not None:
                former.blocks.discard(block_hash)
                if not former.blocks:
                    self._remove(former)
                elif former.blocks == {former.rest}:  # only an equal prompt finds it: the first to go
                    self._entries.move_to_end(id(former), last=False)
            self._index[block_hash] = entry
            entry.blocks.add(block_hash)
        while self.used_bytes > self.max_bytes:
            self._remove(next(iter(self._entries.values())))

    def clear(self) -> None:
        self._entries.clear()
        self._index.clear()
        self.used_bytes = 0

    def _remove(self, entry: _CachedPrefix) -> None:
        del self._entries[id(entry)]
        self.used_bytes -= entry.snapshot.nbytes
        for block_hash in entry.blocks:
            del self._index[block_hash]

"""The prefix cache: keys and values of finished and prefilled sequences, found again by their tokens.

A follow-up turn begins with the turn before, and the sessions of a group begin alike: what they share
is computed once. Sequences are matched in whole blocks of tokens, by a chain of hashes (as vLLM does),
and then token by token, so that a collision costs nothing but a miss.

Everything here belongs to one version of the weights; the scheduler clears it when they change.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tidegate.engine.requests.block_hashes import BLOCK


class Snapshot(Protocol):
    """Copied keys and values of one sequence."""

    @property
    def nbytes(self) -> int: ...


@dataclass(slots=True, eq=False)
class _Entry:
    tokens: list[int]
    snapshot: Snapshot
    blocks: set[int] = field(default_factory=set)
    """The chain hashes that the index finds it by."""


class PrefixStore:
    """Least recently used entries, at most `max_bytes` of them; 0 keeps none."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held_bytes = 0
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self._index: dict[int, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, tokens: Sequence[int], hashes: Sequence[int]) -> tuple[int, Snapshot | None]:
        """How many leading tokens are held, a multiple of BLOCK, and the snapshot that holds them."""
        for blocks in range(len(hashes), 0, -1):
            entry = self._index.get(hashes[blocks - 1])
            length = blocks * BLOCK
            if entry is not None and entry.tokens[:length] == tokens[:length]:
                self._entries.move_to_end(id(entry))
                return length, entry.snapshot
        return 0, None

    def holds(self, hashes: Sequence[int]) -> bool:
        """Whether all whole blocks of a sequence are held already."""
        return not hashes or hashes[-1] in self._index

    def add(self, tokens: Sequence[int], hashes: Sequence[int], snapshot: Snapshot) -> None:
        """Keep a sequence; an entry that it contains whole is superseded."""
        if snapshot.nbytes > self.max_bytes:
            return
        entry = _Entry(list(tokens[: len(hashes) * BLOCK]), snapshot)
        self._entries[id(entry)] = entry
        self.held_bytes += snapshot.nbytes
        for one in hashes:
            former = self._index.get(one)
            if former is not None:
                former.blocks.discard(one)
                if not former.blocks:
                    self._remove(former)
            self._index[one] = entry
            entry.blocks.add(one)
        while self.held_bytes > self.max_bytes:
            self._remove(next(iter(self._entries.values())))

    def clear(self) -> None:
        self._entries.clear()
        self._index.clear()
        self.held_bytes = 0

    def _remove(self, entry: _Entry) -> None:
        del self._entries[id(entry)]
        self.held_bytes -= entry.snapshot.nbytes
        for one in entry.blocks:
            del self._index[one]

"""LRU cache of search results."""

from __future__ import annotations

import sys
from collections import OrderedDict

from tidegate.rag.client import SearchResult
from tidegate.rag.server.query import Query

_ENTRY_BYTES = 512  # overhead of the objects besides the strings
_ROW_BYTES = 128


class Cache:
    """Caches the answers of one index, up to `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._answers: OrderedDict[Query, tuple[list[SearchResult], int]] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, query: Query) -> list[SearchResult] | None:
        cached = self._answers.get(query)
        if cached is None:
            return None
        self._answers.move_to_end(query)
        return cached[0]

    def put(self, query: Query, answer: list[SearchResult]) -> None:
        """Caches an answer, unless it exceeds the limit alone."""
        size = _size(query, answer)
        if query in self._answers or size > self._limit:
            return
        self._answers[query] = (answer, size)
        self.bytes += size
        while self.bytes > self._limit:
            _, (_, freed) = self._answers.popitem(last=False)
            self.bytes -= freed


def _size(query: Query, answer: list[SearchResult]) -> int:
    texts = sum(map(sys.getsizeof, (text for row in answer for text in (row.id, row.title, row.text))))
    return _ENTRY_BYTES + sys.getsizeof(query.query) + texts + _ROW_BYTES * len(answer)

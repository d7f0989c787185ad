"""Queries to an index: the computation of a batch of them, and the cache of results."""

from __future__ import annotations

import logging
import math
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from tidegate.errors import RetrievalUnavailable
from tidegate.rag.client import SearchResult
from tidegate.rag.index.searcher import Searcher

_ENTRY_BYTES = 512  # overhead of the objects besides the strings
_ROW_BYTES = 128

log = logging.getLogger("tidegate.rag")


@dataclass(frozen=True, slots=True)
class Query:
    """One query with its number of documents and search mode. Equal queries have equal answers."""

    query: str
    k: int
    mode: str


Answer = list[SearchResult] | RetrievalUnavailable
"""Documents, best first, or the error."""


def answer_all(index: Searcher, queries: Sequence[Query]) -> list[Answer]:
    """Returns an answer for every query, in order; makes one search per mode."""
    answers: dict[int, Answer] = {}
    for mode in {query.mode for query in queries}:
        positions = [position for position, query in enumerate(queries) if query.mode == mode]
        answered = _answer(index, [queries[position] for position in positions])
        answers.update(zip(positions, answered, strict=True))
    return [answers[position] for position in range(len(queries))]


def _answer(index: Searcher, queries: Sequence[Query]) -> Sequence[Answer]:
    """Searches; if that fails, searches each half alone, so that one bad query does not fail the others."""
    try:
        results = index.search(
            [query.query for query in queries], [query.k for query in queries], queries[0].mode
        )
        for result in (result for found in results for result in found):
            if not math.isfinite(result.score):
                raise ValueError(f"the document {result.id!r} has the score {result.score}")
        return results
    except Exception as error:
        if len(queries) > 1:
            half = len(queries) // 2
            return [*_answer(index, queries[:half]), *_answer(index, queries[half:])]
        log.error("a search failed", exc_info=error)
        return [RetrievalUnavailable(f"the search failed: {error!r}", code="search_failed")]


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

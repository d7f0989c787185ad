"""Queries to an index, and the computation of a batch of them."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tidegate.errors import RetrievalUnavailable
from tidegate.rag.client import SearchResult
from tidegate.rag.corpus.corpus import Document

log = logging.getLogger("tidegate.rag")


@dataclass(frozen=True, slots=True)
class Query:
    """One query with its number of documents and search mode. Equal queries have equal answers."""

    query: str
    k: int
    mode: str


Answer = list[SearchResult] | RetrievalUnavailable
"""Documents, best first, or the error."""


class Match(Protocol):
    """A document's row in the index and its score."""

    @property
    def row(self) -> int: ...
    @property
    def score(self) -> float: ...


class Index(Protocol):
    """Interface of an opened index, which `tidegate.rag.index.searcher.Searcher` implements; thread-safe."""

    @property
    def modes(self) -> Sequence[str]: ...
    def search(
        self, queries: Sequence[str], ks: Sequence[int], mode: str | None
    ) -> Sequence[Sequence[Match]]: ...
    def document(self, row: int) -> Document: ...
    def find(self, id: str) -> Document | None: ...
    def __len__(self) -> int: ...


def answer_all(index: Index, queries: Sequence[Query]) -> list[Answer]:
    """Returns an answer for every query, in order; makes one search per mode."""
    answers: dict[int, Answer] = {}
    for mode in {query.mode for query in queries}:
        positions = [position for position, query in enumerate(queries) if query.mode == mode]
        answered = _answer(index, [queries[position] for position in positions])
        answers.update(zip(positions, answered, strict=True))
    return [answers[position] for position in range(len(queries))]


def _answer(index: Index, queries: Sequence[Query]) -> list[Answer]:
    """Searches; if that fails, searches each half alone, so that one bad query does not fail the others."""
    try:
        matches = index.search(
            [query.query for query in queries], [query.k for query in queries], queries[0].mode
        )
        if len(matches) != len(queries):
            raise ValueError(f"{len(matches)} results for {len(queries)} queries")
        return [_results(index, rows) for rows in matches]
    except Exception as error:
        if len(queries) > 1:
            half = len(queries) // 2
            return [*_answer(index, queries[:half]), *_answer(index, queries[half:])]
        log.error("a search failed", exc_info=error)
        return [RetrievalUnavailable(f"the search failed: {error!r}", code="search_failed")]


def _results(index: Index, matches: Sequence[Match]) -> list[SearchResult]:
    """Reads the documents. Raises ValueError for a score that is not finite."""
    results = []
    for match in matches:
        if not math.isfinite(match.score):
            raise ValueError(f"row {match.row} has the score {match.score}")
        document = index.document(match.row)
        results.append(SearchResult(document.id, document.title, document.text, float(match.score)))
    return results

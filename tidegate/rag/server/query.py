"""What is asked of an index, and how a batch of it is answered."""

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
    """One query, with how many documents are wanted and how they are looked for. Equal questions to one
    index have one answer."""

    query: str
    k: int
    mode: str


Answer = list[SearchResult] | RetrievalUnavailable
"""Documents, best first; or why there is no answer."""


class Match(Protocol):
    """A document's place in the index, and how well it fits."""

    @property
    def row(self) -> int: ...
    @property
    def score(self) -> float: ...


class Index(Protocol):
    """What the server needs of an index that was opened; `rag.searcher.Searcher` is one.

    Its methods may be called from several threads at once.
    """

    @property
    def modes(self) -> Sequence[str]: ...
    def search(
        self, queries: Sequence[str], ks: Sequence[int], mode: str | None
    ) -> Sequence[Sequence[Match]]: ...
    def document(self, row: int) -> Document: ...
    def find(self, id: str) -> Document | None: ...
    def __len__(self) -> int: ...


def answer_all(index: Index, questions: Sequence[Query]) -> list[Answer]:
    """An answer for every question, in their order; each way of looking is one search."""
    answers: dict[int, Answer] = {}
    for mode in {question.mode for question in questions}:
        places = [place for place, question in enumerate(questions) if question.mode == mode]
        found = _answer(index, [questions[place] for place in places])
        answers.update(zip(places, found, strict=True))
    return [answers[place] for place in range(len(questions))]


def _answer(index: Index, questions: Sequence[Query]) -> list[Answer]:
    """Where a search fails each half is tried by itself: one bad query is nobody else's failure."""
    try:
        matches = index.search(
            [question.query for question in questions],
            [question.k for question in questions],
            questions[0].mode,
        )
        if len(matches) != len(questions):
            raise ValueError(f"{len(matches)} results for {len(questions)} questions")
        return [_found(index, rows) for rows in matches]
    except Exception as error:
        if len(questions) > 1:
            half = len(questions) // 2
            return [*_answer(index, questions[:half]), *_answer(index, questions[half:])]
        log.error("a search failed", exc_info=error)
        return [RetrievalUnavailable(f"the search failed: {error!r}", code="search_failed")]


def _found(index: Index, matches: Sequence[Match]) -> list[SearchResult]:
    """Raises ValueError for a score that is no number: such a ranking says nothing."""
    rows = []
    for match in matches:
        if not math.isfinite(match.score):
            raise ValueError(f"row {match.row} has the score {match.score}")
        document = index.document(match.row)
        rows.append(SearchResult(document.id, document.title, document.text, float(match.score)))
    return rows

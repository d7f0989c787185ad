"""Answers that were given before, the least recently asked for leaving first."""

from __future__ import annotations

import sys
from collections import OrderedDict

from tidegate.rag.client import SearchResult
from tidegate.rag.server.query import Query

_ENTRY_BYTES = 512  # of the objects around the texts
_ROW_BYTES = 128


class Cache:
    """Holds answers of at most `limit` bytes together; of one index, whose end is its end."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._answers: OrderedDict[Query, tuple[list[SearchResult], int]] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, question: Query) -> list[SearchResult] | None:
        held = self._answers.get(question)
        if held is None:
            return None
        self._answers.move_to_end(question)
        return held[0]

    def put(self, question: Query, answer: list[SearchResult]) -> None:
        """Keep an answer, unless it alone is larger than the whole."""
        size = _size(question, answer)
        if question in self._answers or size > self._limit:
            return
        self._answers[question] = (answer, size)
        self.bytes += size
        while self.bytes > self._limit:
            _, (_, freed) = self._answers.popitem(last=False)
            self.bytes -= freed


def _size(question: Query, answer: list[SearchResult]) -> int:
    texts = sum(map(sys.getsizeof, (text for row in answer for text in (row.id, row.title, row.text))))
    return _ENTRY_BYTES + sys.getsizeof(question.query) + texts + _ROW_BYTES * len(answer)

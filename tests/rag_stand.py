"""A retrieval server in this process, on an index with fault injection."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tests.serving import served
from tests.waiting import eventually
from tidegate.rag.client import SearchResult
from tidegate.rag.corpus.corpus import Document
from tidegate.rag.server.app import create_app
from tidegate.rag.server.service import RagOptions, Retrieval


@dataclass
class FakeIndex:
    """`size` documents; the query `"n"` finds document n first, then those after it.

    Searches wait until `gate` is set; `poison` is a query whose search raises; `batches` are the queries of
    each search.
    """

    size: int = 50
    label: str = "a"
    modes: tuple[str, ...] = ("dense", "bm25", "hybrid")
    poison: str | None = None
    gate: threading.Event = field(default_factory=threading.Event)
    batches: list[tuple[str, ...]] = field(default_factory=list)
    searched_in: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.gate.set()

    def __len__(self) -> int:
        return self.size

    @property
    def info(self) -> dict[str, Any]:
        return {"documents": self.size, "index": None}

    def search(
        self, queries: Sequence[str], ks: Sequence[int], mode: str | None = None
    ) -> list[list[SearchResult]]:
        self.batches.append(tuple(queries))
        self.searched_in.add(threading.current_thread().name)
        assert self.gate.wait(30)
        if self.poison in queries:
            raise RuntimeError("this query is poison")
        return [self._matches(query, min(k, self.size)) for query, k in zip(queries, ks, strict=True)]

    def _matches(self, query: str, k: int) -> list[SearchResult]:
        first = int(query)
        found = [(self.document((first + place) % self.size), 1 / (1 + place)) for place in range(k)]
        return [SearchResult(document.id, document.title, document.text, score) for document, score in found]

    def document(self, row: int) -> Document:
        return Document(f"d/{row}", f"Title {row}", f"Text {row} of {self.label}.")

    def find(self, id: str) -> Document | None:
        row = int(id.removeprefix("d/")) if id.removeprefix("d/").isdecimal() else self.size
        return self.document(row) if row < self.size else None


class Stand(NamedTuple):
    url: str
    retrieval: Retrieval


@contextlib.asynccontextmanager
async def serving(
    index: Any, *, port: int = 0, open_index: Callable[[Path, RagOptions], Any] | None = None, **options: Any
) -> AsyncIterator[Stand]:
    """Serves an index inside the block."""
    settings = RagOptions(directory=Path("index"), **options)
    retrieval = Retrieval(settings, open_index or (lambda directory, options: index))
    async with served(create_app(retrieval), port) as url:
        await eventually(lambda: retrieval.ready or open_index is not None)
        yield Stand(url, retrieval)

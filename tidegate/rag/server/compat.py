"""`POST /retrieve`, as agents of other projects call it; the body's fields tell the shapes apart.

- `queries`, `topk`, `return_scores` (Search-R1): `{"result": [[{"document", "score"}]]}`, or without scores
  `{"result": [[document]]}`, a list for each query. A document is `{"id", "contents"}`, and its contents are
  the title in quotes, a line break and the text.
- `query`, with `topk` or `return_scores`: the same for one query, still in a list.
- `query`, with `top_k` or `k` (rLLM): `{"query", "method", "results": [{"id", "content", "score"}],
  "num_results"}`.

Fields that only mean something to the peer's own server are passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tidegate.errors import RetrievalRefused
from tidegate.rag.client import SearchResult
from tidegate.rag.server.schemas import SearchRequest, number, text, texts

Write = Callable[[list[list[SearchResult]]], dict[str, Any]]


def read_retrieve(payload: Mapping[str, Any], method: str) -> tuple[SearchRequest, Write]:
    """What is asked, and how its answer is written. `method` is the server's way of searching.

    Raises RetrievalRefused that names what is wrong.
    """
    if ("query" in payload) == ("queries" in payload):
        raise RetrievalRefused("give either queries, a list of texts, or query, a text")
    if "queries" in payload:
        return SearchRequest(texts(payload, "queries"), number(payload, "topk")), _lists(payload)
    query = text(payload, "query")
    if "topk" in payload or "return_scores" in payload:
        return SearchRequest([query], number(payload, "topk")), _lists(payload)
    k = number(payload, "top_k")
    asked = SearchRequest([query], number(payload, "k") if k is None else k)
    return asked, lambda results: _one(query, method, results[0])


def contents(found: SearchResult) -> str:
    """A passage as Search-R1's corpora have it."""
    return f'"{found.title}"\n{found.text}' if found.title else found.text


def _lists(payload: Mapping[str, Any]) -> Write:
    scored = payload.get("return_scores", False)
    if not isinstance(scored, bool):
        raise RetrievalRefused(f"return_scores: true or false was expected, not {scored!r:.50}")

    def write(results: list[list[SearchResult]]) -> dict[str, Any]:
        return {"result": [[_entry(found, scored) for found in rows] for rows in results]}

    return write


def _entry(found: SearchResult, scored: bool) -> dict[str, Any]:
    document = {"id": found.id, "contents": contents(found)}
    return {"document": document, "score": found.score} if scored else document


def _one(query: str, method: str, rows: list[SearchResult]) -> dict[str, Any]:
    results = [{"id": found.id, "content": contents(found), "score": found.score} for found in rows]
    return {"query": query, "method": method, "results": results, "num_results": len(results)}

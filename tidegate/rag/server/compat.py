"""`POST /retrieve` in the formats of other projects, which are distinguished by the fields of the body.

- `queries`, `topk`, `return_scores` (Search-R1): `{"result": [[{"document", "score"}]]}`, or without scores
  `{"result": [[document]]}`, with a list for each query. A document is `{"id", "contents"}`, and its contents
  are the title in quotes, a line break and the text.
- `query` with `topk` or `return_scores`: the same for one query, still in a list.
- `query` with `top_k` or `k` (rLLM): `{"query", "method", "results": [{"id", "content", "score"}],
  "num_results"}`.

Fields that apply only to the other project's server are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tidegate.errors import RetrievalRefused
from tidegate.rag.client import SearchResult
from tidegate.rag.server.schemas import SearchRequest, number, text, texts

Write = Callable[[list[list[SearchResult]]], dict[str, Any]]


def read_retrieve(payload: Mapping[str, Any], method: str) -> tuple[SearchRequest, Write]:
    """Returns the request and the function that formats its answer. `method` is the server's search mode.

    Raises RetrievalRefused, which names the field.
    """
    if ("query" in payload) == ("queries" in payload):
        raise RetrievalRefused("give either queries (a list of strings) or query (a string)")
    if "queries" in payload:
        return SearchRequest(texts(payload, "queries"), number(payload, "topk")), _search_r1_writer(payload)
    query = text(payload, "query")
    if "topk" in payload or "return_scores" in payload:
        return SearchRequest([query], number(payload, "topk")), _search_r1_writer(payload)
    k = number(payload, "top_k")
    request = SearchRequest([query], number(payload, "k") if k is None else k)
    return request, lambda results: _rllm_reply(query, method, results[0])


def contents(result: SearchResult) -> str:
    """Formats a passage as in Search-R1's corpora."""
    return f'"{result.title}"\n{result.text}' if result.title else result.text


def _search_r1_writer(payload: Mapping[str, Any]) -> Write:
    scored = payload.get("return_scores", False)
    if not isinstance(scored, bool):
        raise RetrievalRefused(f"return_scores must be true or false, not {scored!r:.50}")

    def write(results: list[list[SearchResult]]) -> dict[str, Any]:
        return {"result": [[_search_r1_result(result, scored) for result in rows] for rows in results]}

    return write


def _search_r1_result(result: SearchResult, scored: bool) -> dict[str, Any]:
    document = {"id": result.id, "contents": contents(result)}
    return {"document": document, "score": result.score} if scored else document


def _rllm_reply(query: str, method: str, rows: list[SearchResult]) -> dict[str, Any]:
    results = [{"id": row.id, "content": contents(row), "score": row.score} for row in rows]
    return {"query": query, "method": method, "results": results, "num_results": len(results)}

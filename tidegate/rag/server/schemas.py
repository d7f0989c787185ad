"""Bodies of requests and replies: of our own routes, and of `POST /retrieve` in other projects' formats.

Those formats are distinguished by the fields of the body; fields that apply only to the other project's
server are ignored.

- `queries`, `topk`, `return_scores` (Search-R1): `{"result": [[{"document", "score"}]]}`, or without scores
  `{"result": [[document]]}`, with a list for each query. A document is `{"id", "contents"}`, and its contents
  are the title in quotes, a line break and the text.
- `query` with `topk` or `return_scores`: the same for one query, still in a list.
- `query` with `top_k` or `k` (rLLM): `{"query", "method", "results": [{"id", "content", "score"}],
  "num_results"}`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from tidegate.errors import RetrievalRefused
from tidegate.loading import did_you_mean
from tidegate.rag.client import SearchResult

Write = Callable[[list[list[SearchResult]]], dict[str, Any]]
"""Formats the results of a search as the body of a reply."""
_FIELDS = ("queries", "query", "k", "mode")


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """A search for one or several queries; `k` and `mode` apply to all, None for the server's default."""

    queries: list[str]
    k: int | None = None
    mode: str | None = None


def parse(body: bytes) -> dict[str, Any]:
    """Returns a body's JSON object. Raises RetrievalRefused if it is none."""
    try:
        payload = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RetrievalRefused(f"the body is not JSON: {error}") from None
    if not isinstance(payload, dict):
        raise RetrievalRefused("the body is not a JSON object")
    return payload


def read_search(payload: Mapping[str, Any]) -> tuple[SearchRequest, Write]:
    """Parses `{"queries" | "query", "k"?, "mode"?}`. Raises RetrievalRefused, which names the field."""
    _check_fields(payload, _FIELDS)
    if ("query" in payload) == ("queries" in payload):
        raise RetrievalRefused("give either query (a string) or queries (a list of strings)")
    queries = _texts(payload, "queries") if "queries" in payload else [_text(payload, "query")]
    mode = None if payload.get("mode") is None else _text(payload, "mode")
    return SearchRequest(queries, _number(payload, "k"), mode), lambda results: {"results": results}


def read_reload(body: bytes) -> Path | None:
    """Parses `{"dir"?}` or an empty body, whatever its content type; None for the current directory.

    Raises RetrievalRefused, which names the field.
    """
    payload = parse(body) if body.strip() else {}
    _check_fields(payload, ("dir",))
    return None if payload.get("dir") is None else Path(_text(payload, "dir"))


def read_retrieve(payload: Mapping[str, Any], method: str) -> tuple[SearchRequest, Write]:
    """Returns the request and the function that formats its answer. `method` is the server's search mode.

    Raises RetrievalRefused, which names the field.
    """
    if ("query" in payload) == ("queries" in payload):
        raise RetrievalRefused("give either queries (a list of strings) or query (a string)")
    if "queries" in payload:
        return SearchRequest(_texts(payload, "queries"), _number(payload, "topk")), _search_r1_writer(payload)
    query = _text(payload, "query")
    if "topk" in payload or "return_scores" in payload:
        return SearchRequest([query], _number(payload, "topk")), _search_r1_writer(payload)
    k = _number(payload, "top_k")
    request = SearchRequest([query], _number(payload, "k") if k is None else k)
    return request, lambda results: _rllm_reply(query, method, results[0])


def _search_r1_writer(payload: Mapping[str, Any]) -> Write:
    scored = payload.get("return_scores", False)
    if not isinstance(scored, bool):
        raise RetrievalRefused(f"return_scores must be true or false, not {scored!r:.50}")

    def formatted(result: SearchResult) -> dict[str, Any]:
        document = {"id": result.id, "contents": _contents(result)}
        return {"document": document, "score": result.score} if scored else document

    return lambda results: {"result": [list(map(formatted, rows)) for rows in results]}


def _rllm_reply(query: str, method: str, rows: list[SearchResult]) -> dict[str, Any]:
    results = [{"id": row.id, "content": _contents(row), "score": row.score} for row in rows]
    return {"query": query, "method": method, "results": results, "num_results": len(results)}


def _contents(result: SearchResult) -> str:
    return f'"{result.title}"\n{result.text}' if result.title else result.text


def _check_fields(payload: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in payload:
        if name not in known:
            raise RetrievalRefused(f"unknown field {name[:100]}{did_you_mean(name[:100], known)}")


def _text(payload: Mapping[str, Any], name: str) -> str:
    value = payload[name]
    if not isinstance(value, str):
        raise RetrievalRefused(f"{name} must be a string, not {type(value).__name__}")
    return value


def _texts(payload: Mapping[str, Any], name: str) -> list[str]:
    values = payload[name]
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise RetrievalRefused(f"{name} must be a list of strings")
    return values


def _number(payload: Mapping[str, Any], name: str) -> int | None:
    value = payload.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise RetrievalRefused(f"{name} must be an integer, not {value!r:.50}")
    return value

"""What a search asks for, read from a body: ours. Peers' are in `rag.compat`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from tidegate.errors import RetrievalRefused
from tidegate.loading import did_you_mean
from tidegate.rag.client import SearchResult

_FIELDS = ("queries", "query", "k", "mode")


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """The queries, and what holds for all of them; None: as the server has it."""

    queries: list[str]
    k: int | None = None
    mode: str | None = None


def parse(body: bytes) -> dict[str, Any]:
    """A body's JSON; raises RetrievalRefused where it is none, or no object."""
    try:
        payload = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RetrievalRefused(f"the body is not JSON: {error}") from None
    if not isinstance(payload, dict):
        raise RetrievalRefused("the body is not a JSON object")
    return payload


def read_search(payload: Mapping[str, Any]) -> SearchRequest:
    """`{"queries" | "query", "k"?, "mode"?}`; raises RetrievalRefused that names what is wrong."""
    for name in payload:
        if name not in _FIELDS:
            raise RetrievalRefused(f"{name}: there is no such field{did_you_mean(name, _FIELDS)}")
    if ("query" in payload) == ("queries" in payload):
        raise RetrievalRefused("give either query, a text, or queries, a list of texts")
    queries = texts(payload, "queries") if "queries" in payload else [text(payload, "query")]
    mode = payload.get("mode")
    return SearchRequest(queries, number(payload, "k"), None if mode is None else text(payload, "mode"))


def read_reload(body: bytes) -> Path | None:
    """`{"dir"?}`, or nothing: where the index is, None: where it was. Whatever its content type says, as
    with searches. Raises RetrievalRefused that names what is wrong."""
    payload = parse(body) if body.strip() else {}
    for name in payload:
        if name != "dir":
            raise RetrievalRefused(f"{name}: there is no such field{did_you_mean(name, ('dir',))}")
    return None if payload.get("dir") is None else Path(text(payload, "dir"))


def write_search(results: list[list[SearchResult]]) -> dict[str, Any]:
    return {"results": results}


def text(payload: Mapping[str, Any], name: str) -> str:
    value = payload[name]
    if not isinstance(value, str):
        raise RetrievalRefused(f"{name}: a text was expected, not {type(value).__name__}")
    return value


def texts(payload: Mapping[str, Any], name: str) -> list[str]:
    values = payload[name]
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise RetrievalRefused(f"{name}: a list of texts was expected")
    return values


def number(payload: Mapping[str, Any], name: str) -> int | None:
    """None where it is not there, or null."""
    value = payload.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise RetrievalRefused(f"{name}: a whole number was expected, not {value!r:.50}")
    return value

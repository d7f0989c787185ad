"""Parses the bodies of our own routes; `tidegate.rag.server.compat` has those of other projects."""

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


def read_search(payload: Mapping[str, Any]) -> SearchRequest:
    """Parses `{"queries" | "query", "k"?, "mode"?}`. Raises RetrievalRefused, which names the field."""
    for name in payload:
        if name not in _FIELDS:
            raise RetrievalRefused(f"unknown field {name}{did_you_mean(name, _FIELDS)}")
    if ("query" in payload) == ("queries" in payload):
        raise RetrievalRefused("give either query (a string) or queries (a list of strings)")
    queries = texts(payload, "queries") if "queries" in payload else [text(payload, "query")]
    mode = payload.get("mode")
    return SearchRequest(queries, number(payload, "k"), None if mode is None else text(payload, "mode"))


def read_reload(body: bytes) -> Path | None:
    """Parses `{"dir"?}` or an empty body, whatever its content type; None for the current directory.

    Raises RetrievalRefused, which names the field.
    """
    payload = parse(body) if body.strip() else {}
    for name in payload:
        if name != "dir":
            raise RetrievalRefused(f"unknown field {name}{did_you_mean(name, ('dir',))}")
    return None if payload.get("dir") is None else Path(text(payload, "dir"))


def write_search(results: list[list[SearchResult]]) -> dict[str, Any]:
    return {"results": results}


def text(payload: Mapping[str, Any], name: str) -> str:
    value = payload[name]
    if not isinstance(value, str):
        raise RetrievalRefused(f"{name} must be a string, not {type(value).__name__}")
    return value


def texts(payload: Mapping[str, Any], name: str) -> list[str]:
    values = payload[name]
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise RetrievalRefused(f"{name} must be a list of strings")
    return values


def number(payload: Mapping[str, Any], name: str) -> int | None:
    """Returns an integer, or None if the field is missing or null."""
    value = payload.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise RetrievalRefused(f"{name} must be an integer, not {value!r:.50}")
    return value

"""Calls that are written as JSON objects."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import orjson

from tidegate.gateway.nesting import too_deep
from tidegate.gateway.parsing.parts import ToolCall


def call_of(value: Any, keys: Sequence[str] = ("arguments",)) -> ToolCall | None:
    """The call that a JSON value is; its arguments stand under one of `keys`, or are left out."""
    if not isinstance(value, dict):
        return None
    arguments: Any = next((value[key] for key in keys if key in value), {})
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            return None
    return called(value.get("name"), arguments)


def called(name: Any, arguments: Any) -> ToolCall | None:
    """None where the name is no name, or the arguments are no object that JSON can hold, or too deep."""
    if not isinstance(name, str) or not name or not isinstance(arguments, dict) or too_deep(arguments):
        return None
    try:
        return ToolCall(name, orjson.dumps(arguments).decode())
    except orjson.JSONEncodeError:
        return None


def load(text: str) -> Any:
    """JSON, None where it is none."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def load_many(text: str, separator: str) -> list[Any]:
    """JSON values one after another, with `separator` or whitespace between them; [] where there is
    anything else."""
    decoder = json.JSONDecoder()
    values: list[Any] = []
    rest = text.strip()
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except (json.JSONDecodeError, RecursionError):
            return []
        values.append(value)
        rest = rest[end:].lstrip().removeprefix(separator).lstrip()
    return values


def all_or_none(calls: Sequence[ToolCall | None]) -> list[ToolCall] | None:
    """The calls, where each of them could be read."""
    whole = [call for call in calls if call is not None]
    return whole if whole and len(whole) == len(calls) else None

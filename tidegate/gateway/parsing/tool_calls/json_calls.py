"""Reads calls written as JSON objects."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import orjson

from tidegate.gateway.nesting import too_deep
from tidegate.gateway.parsing.parts import ToolCall


def read_call(value: Any, keys: Sequence[str] = ("arguments",)) -> ToolCall | None:
    """Read a JSON value as a call, its arguments under one of `keys` or omitted; None if it is none."""
    if not isinstance(value, dict):
        return None
    arguments: Any = next((value[key] for key in keys if key in value), {})
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            return None
    return make_call(value.get("name"), arguments)


def make_call(name: Any, arguments: Any) -> ToolCall | None:
    """Create a call; None if the name is invalid, or the arguments are no JSON object or nested too deep."""
    if not isinstance(name, str) or not name or not isinstance(arguments, dict) or too_deep(arguments):
        return None
    try:
        return ToolCall(name, orjson.dumps(arguments).decode())
    except orjson.JSONEncodeError:
        return None


def load_json(text: str) -> Any:
    """Parse JSON; None if it is invalid."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None


def load_json_values(text: str, separator: str) -> list[Any]:
    """Parse JSON values separated by `separator` or whitespace; [] if anything else occurs."""
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
    """Return the calls if all of them were read; else None."""
    valid = [call for call in calls if call is not None]
    return valid if valid and len(valid) == len(calls) else None

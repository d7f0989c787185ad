"""Converts arguments written as bare text by the types in the tool's schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from tidegate.gateway.parsing.tool_calls.base import Tools

_WORDS = {"true": True, "false": False, "null": None, "none": None}


def parameter_schemas(tools: Tools, name: str) -> Mapping[str, Any]:
    """The schemas of a tool's parameters, by name; empty if the tool is unknown."""
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            schemas = parameters.get("properties") if isinstance(parameters, Mapping) else None
            return schemas if isinstance(schemas, Mapping) else {}
    return {}


def parse_value(text: str, schema: Any) -> Any:
    """Convert an argument. Text stays text if the parameter may be a string; else it is parsed as JSON or
    Python's True, False or None. Invalid text stays text, for the tool to reject."""
    kinds = _kinds(schema)
    bare = text.strip()
    if "string" in kinds:
        return None if "null" in kinds and bare.lower() in ("null", "none") else text
    if bare.lower() in _WORDS and (not kinds or kinds & {"boolean", "null"}):
        return _WORDS[bare.lower()]
    try:
        return orjson.loads(bare)
    except orjson.JSONDecodeError:
        return text


def _kinds(schema: Any) -> set[str]:
    """The JSON types that a schema permits; empty if it names none."""
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    kinds = {kind} if isinstance(kind, str) else {name for name in kind or () if isinstance(name, str)}
    if isinstance(schema.get("enum"), list) and all(isinstance(value, str) for value in schema["enum"]):
        kinds.add("string")
    for key in ("anyOf", "oneOf"):
        for option in schema.get(key) or ():
            kinds |= _kinds(option)
    return kinds

"""Arguments that are written as bare text: their types are in the tool's schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from tidegate.gateway.parsing.tool_calls.base import Tools

_WORDS = {"true": True, "false": False, "null": None, "none": None}


def properties(tools: Tools, name: str) -> Mapping[str, Any]:
    """The schemas of a tool's parameters, by their names; empty where the tool is not known."""
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            found = parameters.get("properties") if isinstance(parameters, Mapping) else None
            return found if isinstance(found, Mapping) else {}
    return {}


def typed(text: str, schema: Any) -> Any:
    """The value that a text stands for. A parameter that may be a string is the text itself; any other is
    JSON, or Python's word for true, false or null; what is neither stays text for the tool to judge."""
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
    """The JSON types that a schema permits; empty where it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    kinds = {kind} if isinstance(kind, str) else {one for one in kind or () if isinstance(one, str)}
    if isinstance(schema.get("enum"), list) and all(isinstance(one, str) for one in schema["enum"]):
        kinds.add("string")
    for key in ("anyOf", "oneOf"):
        for option in schema.get(key) or ():
            kinds |= _kinds(option)
    return kinds

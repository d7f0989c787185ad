"""Tool-call formats that write each argument as text between tags; the tool's schema gives its type."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

from tidegate.gateway.parsing.parts import SampledCall
from tidegate.gateway.parsing.tool_calls.base import BlockParser, ToolCallFormat, Tools
from tidegate.gateway.parsing.tool_calls.json_formats import all_or_none, make_call

_TAGS = ("<tool_call>", "</tool_call>")
_WORDS = {"true": True, "false": False, "null": None, "none": None}


def _read_arguments(tools: Tools, name: str, texts: list[tuple[str, str]]) -> list[SampledCall] | None:
    """Reads a call whose arguments are pairs of a name and a text."""
    schemas = _parameter_schemas(tools, name)
    arguments = {key.strip(): parse_value(text, schemas.get(key.strip())) for key, text in texts}
    return all_or_none([make_call(name, arguments)])


def _parameter_schemas(tools: Tools, name: str) -> Mapping[str, Any]:
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            schemas = parameters.get("properties") if isinstance(parameters, Mapping) else None
            return schemas if isinstance(schemas, Mapping) else {}
    return {}


def parse_value(text: str, schema: Any) -> Any:
    """Converts an argument. Text stays text if the parameter may be a string; else it is parsed as JSON or
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
    """Returns the JSON types that a schema permits; empty if it names none."""
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


# Qwen3-Coder: `<tool_call><function=f><parameter=x>1</parameter></function></tool_call>`, one tag a line

_FUNCTION = re.compile(r"\s*<function=([^<>\s]+)\s*>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^<>\s]+)\s*>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


def _read_qwen(text: str, tools: Tools) -> list[SampledCall] | None:
    function = _FUNCTION.fullmatch(text)
    if function is None:
        return None
    name, body = function.groups()
    if _PARAMETER.sub("", body).strip():
        return None  # text between the parameters
    return _read_arguments(tools, name, _PARAMETER.findall(body))


QWEN3_CODER = ToolCallFormat(
    "qwen3_coder",
    _TAGS,
    lambda tools: BlockParser(_read_qwen, tools, *_TAGS),
    lambda name: _TAGS[0] + "\n<function" + ("" if name is None else f"={name}"),
    call_end=_TAGS[1],
)

# GLM-4.5 and later: `<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>`

_ARGUMENTS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


def _read_glm(text: str, tools: Tools) -> list[SampledCall] | None:
    at = text.find(_ARGUMENTS[0])
    name, pairs = (text, "") if at < 0 else (text[:at], text[at:])
    name = name.strip()
    if not re.fullmatch(r"[^\s<>{}]+", name) or _PAIR.sub("", pairs).strip():
        return None
    return _read_arguments(tools, name, _PAIR.findall(pairs))


GLM45 = ToolCallFormat(
    "glm45",
    (*_TAGS, *_ARGUMENTS),
    lambda tools: BlockParser(_read_glm, tools, *_TAGS),
    lambda name: _TAGS[0] + (name or ""),
    call_end=_TAGS[1],
)

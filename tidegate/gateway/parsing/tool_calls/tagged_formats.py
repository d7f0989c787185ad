"""Tool-call formats that write each argument as text between tags; the tool's schema gives its type."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tidegate.gateway.parsing.reply import SampledCall
from tidegate.gateway.parsing.tool_calls.base import BlockParser, Quotes, ToolCallFormat, Tools
from tidegate.gateway.parsing.tool_calls.json_formats import all_or_none, make_call
from tidegate.gateway.parsing.tool_calls.schema_types import is_text_of, type_of, types_of_property
from tidegate.service import exact

_TAGS = ("<tool_call>", "</tool_call>")
_WHOLE = re.compile(r"(-?\d+)\.0+")
_NUMBERS = frozenset(("integer", "number"))
_WORDS = {"true": True, "false": False, "null": None, "none": None}


def _read_arguments(tools: Tools, name: str, texts: list[tuple[str, str]]) -> list[SampledCall] | None:
    """Reads a call whose arguments are pairs of a name and a text; none may occur twice."""
    if len({key.strip() for key, _ in texts}) < len(texts):
        return None
    schema = _parameters(tools, name)
    arguments = {
        key.strip(): parse_value(text, types_of_property(schema, key.strip())) for key, text in texts
    }
    return all_or_none([make_call(name, arguments)])


def _parameters(tools: Tools, name: str) -> Any:
    """Returns the schema of a tool's arguments; None for an unknown tool."""
    functions = [tool.get("function") for tool in tools if isinstance(tool, Mapping)]
    found = [each for each in functions if isinstance(each, Mapping) and each.get("name") == name]
    return found[0].get("parameters") if found else None


def parse_value(text: str, types: frozenset[str]) -> Any:
    """Converts an argument of one of these JSON types; none: it may have any. Text stays text if it may be a
    string; else it is parsed as JSON or Python's True, False or None. Invalid text stays text, for the tool
    to reject."""
    bare = text.strip()
    if exact.dumps(text).decode() in types:
        return text  # a value of an enum
    texts = any(map(is_text_of, types))
    if "string" in types:
        return None if "null" in types and bare.lower() in ("null", "none") else text
    if bare.lower() in _WORDS and (not types or types & {"boolean", "null"}):
        return _WORDS[bare.lower()]
    whole = types & _NUMBERS == {"integer"}
    if whole and (match := _WHOLE.fullmatch(bare)):
        bare = match[1]  # not by a float, which may round it
    try:
        value = exact.loads(bare)
    except ValueError:
        return text
    if whole and isinstance(value, float) and value.is_integer() and abs(value) < exact.EXACT:
        return int(value)  # such as 1e3
    allowed = types | (_NUMBERS if types & _NUMBERS or not texts else frozenset())
    return value if not types or type_of(value) in allowed else text


def _is_balanced(text: str, opening: str, closing: str) -> bool:
    """Returns whether a text closes each tag that it opens; one that does not may hold the next argument."""
    depth = 0
    for tag in re.findall(f"{opening}|{closing}", text):
        depth = max(0, depth - 1) if tag == closing else depth + 1
    return depth == 0


def _between(opening: str, closing: str) -> Quotes:
    """Returns the `Quotes` of arguments between tags, which may contain pairs of them."""
    return lambda piece, opened: max(0, opened + piece.count(opening) - piece.count(closing))


# Qwen3-Coder: `<tool_call><function=f><parameter=x>1</parameter></function></tool_call>`, one tag a line

_FUNCTION = re.compile(r"\s*<function=([^<>\s]+)\s*>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(
    r"\s*<parameter=([^<>\s]+)\s*>\n?(.*?)\n?</parameter>\s*(?=<parameter=[^<>\s]+\s*>|\Z)", re.DOTALL
)


def _read_qwen(text: str, tools: Tools) -> list[SampledCall] | None:
    function = _FUNCTION.fullmatch(text)
    if function is None:
        return None
    name, body = function.groups()
    if _PARAMETER.sub("", body).strip():
        return None  # text between the parameters
    texts = _PARAMETER.findall(body)
    if not all(_is_balanced(text, r"<parameter=[^<>\s]+\s*>", "</parameter>") for _, text in texts):
        return None
    return _read_arguments(tools, name, texts)


QWEN3_CODER = ToolCallFormat(
    "qwen3_coder",
    _TAGS,
    lambda tools: BlockParser(
        _read_qwen,
        tools,
        *_TAGS,
        quotes=_between("<parameter=", "</parameter>"),
        frame=("<function=", "</function>"),
    ),
    lambda name: _TAGS[0] + "\n<function" + ("" if name is None else f"={name}"),
    call_end=_TAGS[1],
)

# GLM-4.5 and later: `<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>`

_ARGUMENTS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_PAIR = re.compile(
    r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*(?=<arg_key>|\Z)", re.DOTALL
)


def _read_glm(text: str, tools: Tools) -> list[SampledCall] | None:
    at = text.find(_ARGUMENTS[0])
    name, pairs = (text, "") if at < 0 else (text[:at], text[at:])
    name = name.strip()
    if not re.fullmatch(r"[^\s<>{}]+", name) or _PAIR.sub("", pairs).strip():
        return None
    texts = _PAIR.findall(pairs)
    if not all(_is_balanced(text, *_ARGUMENTS[2:]) for _, text in texts):
        return None
    return _read_arguments(tools, name, texts)


GLM45 = ToolCallFormat(
    "glm45",
    (*_TAGS, *_ARGUMENTS),
    lambda tools: BlockParser(
        _read_glm, tools, *_TAGS, quotes=_between(*_ARGUMENTS[2:]), frame=(_ARGUMENTS[0], _ARGUMENTS[3])
    ),
    lambda name: _TAGS[0] + (name or ""),
    call_end=_TAGS[1],
)

"""GLM-4.5 and later: `<tool_call>f\\n<arg_key>x</arg_key>\\n<arg_value>1</arg_value>\\n</tool_call>`."""

from __future__ import annotations

import re

from tidegate.gateway.parsing.parts import ToolCall
from tidegate.gateway.parsing.tool_calls.base import BlockParser, ToolCallFormat, Tools
from tidegate.gateway.parsing.tool_calls.json_calls import all_or_none, make_call
from tidegate.gateway.parsing.tool_calls.typed_arguments import parameter_schemas, parse_value

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_ARGUMENTS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_PAIR = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)


def _read(text: str, tools: Tools) -> list[ToolCall] | None:
    at = text.find(_ARGUMENTS[0])
    name, pairs = (text, "") if at < 0 else (text[:at], text[at:])
    name = name.strip()
    if not re.fullmatch(r"[^\s<>{}]+", name) or _PAIR.sub("", pairs).strip():
        return None
    schemas = parameter_schemas(tools, name)
    arguments = {
        key.strip(): parse_value(value, schemas.get(key.strip())) for key, value in _PAIR.findall(pairs)
    }
    return all_or_none([make_call(name, arguments)])


def _parser(tools: Tools) -> BlockParser:
    return BlockParser(_read, tools, OPEN, CLOSE)


def _forced(name: str | None) -> str:
    return OPEN + (name or "")


FORMAT = ToolCallFormat("glm45", (OPEN, CLOSE, *_ARGUMENTS), _parser, _forced, CLOSE)

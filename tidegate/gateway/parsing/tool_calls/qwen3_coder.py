"""Qwen3-Coder: `<tool_call><function=f><parameter=x>1</parameter></function></tool_call>`, one tag a line."""

from __future__ import annotations

import re

from tidegate.gateway.parsing.parts import ToolCall
from tidegate.gateway.parsing.tool_calls.base import BlockParser, ToolCallFormat, Tools
from tidegate.gateway.parsing.tool_calls.json_calls import all_or_none, make_call
from tidegate.gateway.parsing.tool_calls.typed_arguments import parameter_schemas, parse_value

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^<>\s]+)\s*>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^<>\s]+)\s*>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


def _read(text: str, tools: Tools) -> list[ToolCall] | None:
    function = _FUNCTION.fullmatch(text)
    if function is None:
        return None
    name, body = function.groups()
    if _PARAMETER.sub("", body).strip():
        return None  # text between the parameters
    schemas = parameter_schemas(tools, name)
    arguments = {key: parse_value(value, schemas.get(key)) for key, value in _PARAMETER.findall(body)}
    return all_or_none([make_call(name, arguments)])


def _parser(tools: Tools) -> BlockParser:
    return BlockParser(_read, tools, OPEN, CLOSE)


def _forced(name: str | None) -> str:
    return OPEN + "\n<function" + ("" if name is None else f"={name}")


FORMAT = ToolCallFormat("qwen3_coder", (OPEN, CLOSE), _parser, _forced, CLOSE)

"""Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`; since v11 `[TOOL_CALLS]f[ARGS]{…}` per call."""

from __future__ import annotations

import re

from tidegate.gateway.parsing.parts import ToolCall
from tidegate.gateway.parsing.tool_calls.base import BlockParser, ToolCallFormat, Tools
from tidegate.gateway.parsing.tool_calls.json_calls import all_or_none, load_json, make_call, read_call

_OPEN, _ARGUMENTS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAMED = re.compile(r"\s*([^\s\[{]+)(?:\[CALL_ID\][^\[]*)?\s*\[ARGS\](.*)", re.DOTALL)


def _read(text: str, _: Tools) -> list[ToolCall] | None:
    named = _NAMED.fullmatch(text)
    if named is not None:
        return all_or_none([make_call(named[1], load_json(named[2]))])
    values = load_json(text)
    return all_or_none([read_call(value) for value in values]) if isinstance(values, list) else None


def _parser(tools: Tools) -> BlockParser:
    return BlockParser(_read, tools, _OPEN)


FORMAT = ToolCallFormat("mistral", (_OPEN, _ARGUMENTS, _ID), _parser)

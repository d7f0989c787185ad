"""Kimi K2: `functions.f:0` and JSON arguments between the markers of a call."""

from __future__ import annotations

import re

from tidegate.gateway.parsing.parts import ToolCall
from tidegate.gateway.parsing.tool_calls.base import BlockParser, ToolCallFormat, Tools
from tidegate.gateway.parsing.tool_calls.json_calls import all_or_none, load_json, make_call

_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_OPEN, _CLOSE, _ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"
_ID = re.compile(r"\s*(?:functions\.)?([^\s:]+?)(?::\d+)?\s*")


def _read(text: str, _: Tools) -> list[ToolCall] | None:
    head, _separator, arguments = text.partition(_ARGUMENTS)
    match = _ID.fullmatch(head)
    return None if match is None else all_or_none([make_call(match[1], load_json(arguments))])


def _parser(tools: Tools) -> BlockParser:
    return BlockParser(_read, tools, _OPEN, _CLOSE, _SECTION)


def _forced(name: str | None) -> str:
    return _SECTION[0] + _OPEN + "functions." + (name or "")


FORMAT = ToolCallFormat("kimi_k2", (*_SECTION, _OPEN, _CLOSE, _ARGUMENTS), _parser, _forced)

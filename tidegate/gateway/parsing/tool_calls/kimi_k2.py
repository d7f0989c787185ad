"""Kimi K2: `functions.f:0`, then the arguments as JSON, between a call's tokens."""

from __future__ import annotations

import re

from tidegate.gateway.parsing.parts import ToolCall
from tidegate.gateway.parsing.tool_calls.base import BlockParser, ToolCallFormat, Tools
from tidegate.gateway.parsing.tool_calls.json_calls import all_or_none, called, load

_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_OPEN, _CLOSE, _ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"
_ID = re.compile(r"\s*(?:functions\.)?([^\s:]+?)(?::\d+)?\s*")


def _read(text: str, _: Tools) -> list[ToolCall] | None:
    head, _separator, arguments = text.partition(_ARGUMENTS)
    known = _ID.fullmatch(head)
    return None if known is None else all_or_none([called(known[1], load(arguments))])


def _parser(tools: Tools) -> BlockParser:
    return BlockParser(_read, tools, _OPEN, _CLOSE, _SECTION)


def _forced(name: str | None) -> str:
    return _SECTION[0] + _OPEN + "functions." + (name or "")


FORM = ToolCallFormat("kimi_k2", (*_SECTION, _OPEN, _CLOSE, _ARGUMENTS), _parser, _forced)

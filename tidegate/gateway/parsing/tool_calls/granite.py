"""Granite 3: `<|tool_call|>[{"name": …, "arguments": {…}}, …]`, to the end of the reply."""

from __future__ import annotations

from tidegate.gateway.parsing.parts import ToolCall
from tidegate.gateway.parsing.tool_calls.base import BlockParser, ToolCallFormat, Tools
from tidegate.gateway.parsing.tool_calls.json_calls import all_or_none, load_json, read_call

_OPEN = "<|tool_call|>"


def _read(text: str, _: Tools) -> list[ToolCall] | None:
    values = load_json(text)
    return all_or_none([read_call(value) for value in values]) if isinstance(values, list) else None


def _parser(tools: Tools) -> BlockParser:
    return BlockParser(_read, tools, _OPEN)


FORMAT = ToolCallFormat("granite", (_OPEN,), _parser)

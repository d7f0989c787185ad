"""Hermes, also Qwen 2.5 and 3: `<tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>`."""

from __future__ import annotations

import orjson

from tidegate.gateway.parsing.parts import ToolCall
from tidegate.gateway.parsing.tool_calls.base import BlockParser, ToolCallFormat, Tools
from tidegate.gateway.parsing.tool_calls.json_calls import all_or_none, load_json, read_call

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def _read(text: str, _: Tools) -> list[ToolCall] | None:
    return all_or_none([read_call(load_json(text))])


def _parser(tools: Tools) -> BlockParser:
    return BlockParser(_read, tools, OPEN, CLOSE)


def _forced(name: str | None) -> str:
    start = OPEN + '\n{"name":'
    return start if name is None else f'{start} {orjson.dumps(name).decode()}, "arguments":'


FORMAT = ToolCallFormat("hermes", (OPEN, CLOSE), _parser, _forced, CLOSE)

"""DeepSeek: V3 and R1 write `function`, a separator, the name and a Markdown block of JSON arguments between
the markers of a call; V3.1 writes the name, the separator and the arguments."""

from __future__ import annotations

import re

from tidegate.gateway.parsing.parts import ToolCall
from tidegate.gateway.parsing.tool_calls.base import BlockParser, ToolCallFormat, Tools
from tidegate.gateway.parsing.tool_calls.json_calls import all_or_none, load_json, make_call

_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_OPEN, _CLOSE, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_FENCED = re.compile(r"\s*(\S+)\s*```(?:json)?\n(.*)\n```\s*", re.DOTALL)


def _read(text: str, _: Tools) -> list[ToolCall] | None:
    head, separator, rest = text.partition(_SEPARATOR)
    if not separator:
        return None
    fenced = _FENCED.fullmatch(rest)
    name, arguments = fenced.groups() if fenced is not None else (head.strip(), rest)
    return all_or_none([make_call(name, load_json(arguments))])


def _parser(tools: Tools) -> BlockParser:
    return BlockParser(_read, tools, _OPEN, _CLOSE, _SECTION)


FORMAT = ToolCallFormat("deepseek_v3", (*_SECTION, _OPEN, _CLOSE, _SEPARATOR), _parser)

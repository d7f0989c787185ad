"""Llama 3: the reply is `{"name": …, "parameters": {…}}`, or several of these separated by `;`.

`<|python_tag|>` may precede them, also after text. Without it, a reply that begins with a brace may be a call
or a JSON answer, so it is held back until its end.
"""

from __future__ import annotations

from typing import Any

import orjson

from tidegate.gateway.parsing.parts import Part, ToolCall
from tidegate.gateway.parsing.tool_calls.base import BlockParser, ToolCallFormat, Tools
from tidegate.gateway.parsing.tool_calls.json_calls import all_or_none, load_json_values, read_call

_TAG = "<|python_tag|>"
_KEYS = ("parameters", "arguments")


def _read(text: str, _: Tools) -> list[ToolCall] | None:
    return all_or_none([_call(value) for value in load_json_values(text, ";")])


def _call(value: Any) -> ToolCall | None:
    """Read a call; an object without arguments is taken for a JSON answer."""
    is_call = isinstance(value, dict) and any(key in value for key in _KEYS)
    return read_call(value, _KEYS) if is_call else None


class LlamaParser:
    """Parses a reply that begins with a brace at its end, and any other incrementally."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._blocks = BlockParser(_read, tools, _TAG)
        self._status: str | None = None
        self._held = ""
        self._begun = False

    @property
    def status(self) -> str | None:
        return self._status or self._blocks.status

    def feed(self, text: str) -> list[Part]:
        if self._begun:
            return self._blocks.feed(text)
        self._held += text
        solid = self._held.lstrip()
        if not solid or solid[0] == "{":
            return []
        self._begun, text = True, self._held
        return self._blocks.feed(text)

    def finish(self) -> list[Part]:
        if self._begun:
            return self._blocks.finish()
        calls = _read(self._held, self._tools)
        if calls is None:
            self._status = "malformed" if _looks_like_a_call(self._held) else None
            return [self._held] if self._held else []
        self._status = "ok"
        return list(calls)


def _looks_like_a_call(text: str) -> bool:
    """Whether invalid JSON was probably meant as a call."""
    return '"name"' in text and any(f'"{key}"' in text for key in _KEYS)


def _forced(name: str | None) -> str:
    start = '{"name":'
    return start if name is None else f'{start} {orjson.dumps(name).decode()}, "parameters":'


FORMAT = ToolCallFormat("llama3_json", (_TAG,), LlamaParser, _forced)

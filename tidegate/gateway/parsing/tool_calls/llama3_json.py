"""Llama 3: a reply that is `{"name": …, "parameters": {…}}`, or several with `;` between them.

`<|python_tag|>` may stand before them, also after some text. Without it a reply that begins with a brace
may be a call or an answer in JSON, so it is held back until it is over.
"""

from __future__ import annotations

from typing import Any

import orjson

from tidegate.gateway.parsing.parts import Part, ToolCall
from tidegate.gateway.parsing.tool_calls.base import BlockParser, ToolCallFormat, Tools
from tidegate.gateway.parsing.tool_calls.json_calls import all_or_none, call_of, load_many

_TAG = "<|python_tag|>"
_KEYS = ("parameters", "arguments")


def _read(text: str, _: Tools) -> list[ToolCall] | None:
    return all_or_none([_call(value) for value in load_many(text, ";")])


def _call(value: Any) -> ToolCall | None:
    """Any object may be an answer, so a call shows its arguments."""
    shown = isinstance(value, dict) and any(key in value for key in _KEYS)
    return call_of(value, _KEYS) if shown else None


class LlamaParser:
    """Gives a reply that begins with a brace when it is over, and any other as it comes."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._rest = BlockParser(_read, tools, _TAG)
        self._status: str | None = None
        self._held = ""
        self._begun = False

    @property
    def status(self) -> str | None:
        return self._status or self._rest.status

    def feed(self, text: str) -> list[Part]:
        if self._begun:
            return self._rest.feed(text)
        self._held += text
        solid = self._held.lstrip()
        if not solid or solid[0] == "{":
            return []
        self._begun, text = True, self._held
        return self._rest.feed(text)

    def finish(self) -> list[Part]:
        if self._begun:
            return self._rest.finish()
        calls = _read(self._held, self._tools)
        if calls is None:
            self._status = "malformed" if _looks_like_a_call(self._held) else None
            return [self._held] if self._held else []
        self._status = "ok"
        return list(calls)


def _looks_like_a_call(text: str) -> bool:
    """Rather a call that went wrong than an answer in JSON."""
    return '"name"' in text and any(f'"{key}"' in text for key in _KEYS)


def _forced(name: str | None) -> str:
    start = '{"name":'
    return start if name is None else f'{start} {orjson.dumps(name).decode()}, "parameters":'


FORM = ToolCallFormat("llama3_json", (_TAG,), LlamaParser, _forced)

"""Llama 3: the reply is `{"name": …, "parameters": {…}}`, or several of these separated by `;`.

`<|python_tag|>` may precede them, also after text. Without it, a reply that begins with a brace may be a call
or a JSON answer, so it is held back until its end.
"""

from __future__ import annotations

from typing import Any

from tidegate.gateway.parsing.parts import Part, SampledCall
from tidegate.gateway.parsing.tool_calls.base import BlockParser, ToolCallFormat, Tools
from tidegate.gateway.parsing.tool_calls.json_formats import (
    ARGUMENTS,
    DECODER,
    all_or_none,
    json_start,
    read_call,
)

_TAG = "<|python_tag|>"


def _read(text: str, _: Tools) -> list[SampledCall] | None:
    return all_or_none([_call(value) for value in _load_json_values(text)])


def _load_json_values(text: str) -> list[Any]:
    """Parses JSON values separated by `;` or whitespace; returns [] if anything else occurs."""
    values: list[Any] = []
    rest = text.strip()
    while rest:
        try:
            value, end = DECODER.raw_decode(rest)
        except (ValueError, RecursionError):
            return []
        values.append(value)
        rest = rest[end:].lstrip().removeprefix(";").lstrip()
    return values


def _call(value: Any) -> SampledCall | None:
    """Reads a call; an object without arguments is taken for a JSON answer."""
    return read_call(value) if isinstance(value, dict) and value.keys() & ARGUMENTS else None


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
            meant_as_call = '"name"' in self._held and any(f'"{key}"' in self._held for key in ARGUMENTS)
            self._status = "malformed" if meant_as_call else None
            return [self._held] if self._held else []
        self._status = "ok"
        return list(calls)


LLAMA3_JSON = ToolCallFormat("llama3_json", (_TAG,), LlamaParser, lambda name: json_start(name, "parameters"))

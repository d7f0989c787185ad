"""Tool-call formats that write the arguments of a call as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from tidegate.gateway.parsing.reply import Part, SampledCall
from tidegate.gateway.parsing.tool_calls.base import BlockParser, ToolCallFormat, Tools
from tidegate.service import exact

_TAGS = ("<tool_call>", "</tool_call>")
ARGUMENTS = frozenset(("arguments", "parameters", "args"))
"""Fields of a call in which models write its arguments, whatever their format has."""
_BESIDE = frozenset(("name", "id", "type", "index"))
"""Other fields of a call, which have no arguments."""


def load_json(text: str) -> Any:
    """Parses JSON; returns None if it is invalid, or an object has a key twice."""
    try:
        return DECODER.decode(text)
    except (ValueError, RecursionError):
        return None


DECODER = json.JSONDecoder(
    parse_constant=exact.no_constant, parse_float=exact.finite_float, object_pairs_hook=exact.distinct
)


def read_call(value: Any) -> SampledCall | None:
    """Reads a JSON value as a call, with arguments under one of ARGUMENTS or without; None if it is none, or
    if other fields may be arguments."""
    if not isinstance(value, dict):
        return None
    keys = value.keys() - _BESIDE
    if len(keys) > 1 or not keys <= ARGUMENTS:
        return None
    arguments: Any = value[keys.pop()] if keys else {}
    if isinstance(arguments, str):
        arguments = load_json(arguments) if arguments.strip() else {}
    return make_call(value.get("name"), arguments)


def make_call(name: Any, arguments: Any) -> SampledCall | None:
    """Creates a call; None if the name is invalid, or the arguments are no JSON object or nested too deep."""
    if not isinstance(name, str) or not name or not isinstance(arguments, dict) or exact.too_deep(arguments):
        return None
    try:
        return SampledCall(name, exact.dumps(arguments).decode())
    except (TypeError, ValueError):
        return None


def all_or_none(calls: Sequence[SampledCall | None]) -> list[SampledCall] | None:
    """Returns the calls if all of them were read; else None."""
    valid = [call for call in calls if call is not None]
    return valid if valid and len(valid) == len(calls) else None


def _read_list(text: str, _: Tools) -> list[SampledCall] | None:
    values = load_json(text)
    return all_or_none([read_call(value) for value in values]) if isinstance(values, list) else None


# Hermes, also Qwen 2.5 and 3: `<tool_call>\n{"name": …, "arguments": {…}}\n</tool_call>`


def _read_hermes(text: str, _: Tools) -> list[SampledCall] | None:
    return all_or_none([read_call(load_json(text))])


def _json_start(name: str | None, key: str) -> str:
    """Returns the beginning of a JSON call of the tool `name` whose arguments are under `key`."""
    return '{"name":' if name is None else f'{{"name": {exact.dumps(name).decode()}, "{key}":'


HERMES = ToolCallFormat(
    "hermes",
    _TAGS,
    lambda tools: BlockParser(_read_hermes, tools, *_TAGS),
    lambda name: _TAGS[0] + "\n" + _json_start(name, "arguments"),
    call_end=_TAGS[1],
)

# Granite 3: `<|tool_call|>[{"name": …, "arguments": {…}}, …]`, to the end of the reply

_GRANITE = "<|tool_call|>"
GRANITE = ToolCallFormat("granite", (_GRANITE,), lambda tools: BlockParser(_read_list, tools, _GRANITE))

# Mistral: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`; since v11 `[TOOL_CALLS]f[ARGS]{…}` per call

_MISTRAL = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
_NAMED = re.compile(r"\s*([^\s\[{]+)(?:\[CALL_ID\][^\[]*)?\s*\[ARGS\](.*)", re.DOTALL)


def _read_mistral(text: str, tools: Tools) -> list[SampledCall] | None:
    named = _NAMED.fullmatch(text)
    if named is None:
        return _read_list(text, tools)
    return all_or_none([make_call(named[1], load_json(named[2]))])


MISTRAL = ToolCallFormat("mistral", _MISTRAL, lambda tools: BlockParser(_read_mistral, tools, _MISTRAL[0]))

# DeepSeek: V3 and R1 write `function`, a separator, the name and a Markdown block of JSON arguments between
# the markers of a call; V3.1 writes the name, the separator and the arguments

_DEEPSEEK_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_SEPARATOR = "<｜tool▁sep｜>"
_FENCED = re.compile(r"\s*(\S+)\s*```(?:json)?\n(.*)\n```\s*", re.DOTALL)


def _read_deepseek(text: str, _: Tools) -> list[SampledCall] | None:
    head, separator, rest = text.partition(_SEPARATOR)
    if not separator:
        return None
    fenced = _FENCED.fullmatch(rest)
    name, arguments = fenced.groups() if fenced is not None else (head.strip(), rest)
    return all_or_none([make_call(name, load_json(arguments))])


DEEPSEEK_V3 = ToolCallFormat(
    "deepseek_v3",
    (*_DEEPSEEK_SECTION, *_DEEPSEEK_CALL, _SEPARATOR),
    lambda tools: BlockParser(_read_deepseek, tools, *_DEEPSEEK_CALL, section=_DEEPSEEK_SECTION),
)

# Kimi K2: `functions.f:0` and JSON arguments between the markers of a call

_KIMI_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_KIMI_CALL = ("<|tool_call_begin|>", "<|tool_call_end|>")
_KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
_KIMI_ID = re.compile(r"\s*(?:functions\.)?([^\s:]+?)(?::\d+)?\s*")


def _read_kimi(text: str, _: Tools) -> list[SampledCall] | None:
    head, _separator, arguments = text.partition(_KIMI_ARGUMENTS)
    match = _KIMI_ID.fullmatch(head)
    return None if match is None else all_or_none([make_call(match[1], load_json(arguments))])


KIMI_K2 = ToolCallFormat(
    "kimi_k2",
    (*_KIMI_SECTION, *_KIMI_CALL, _KIMI_ARGUMENTS),
    lambda tools: BlockParser(_read_kimi, tools, *_KIMI_CALL, section=_KIMI_SECTION),
    lambda name: _KIMI_SECTION[0] + _KIMI_CALL[0] + "functions." + (name or ""),
)

# Llama 3: the reply is `{"name": …, "parameters": {…}}`, or several of these separated by `;`.
# `<|python_tag|>` may precede them, also after text. Without it, a reply that begins with a brace may be a
# call or a JSON answer, so it is held back until its end.

_LLAMA = "<|python_tag|>"


def _read_llama(text: str, _: Tools) -> list[SampledCall] | None:
    return all_or_none([_llama_call(value) for value in _load_json_values(text)])


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


def _llama_call(value: Any) -> SampledCall | None:
    """Reads a call; an object without arguments is taken for a JSON answer."""
    return read_call(value) if isinstance(value, dict) and value.keys() & ARGUMENTS else None


class LlamaParser:
    """Parses a reply that begins with a brace at its end, and any other incrementally."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._blocks = BlockParser(_read_llama, tools, _LLAMA)
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
        calls = _read_llama(self._held, self._tools)
        if calls is None:
            meant_as_call = '"name"' in self._held and any(f'"{key}"' in self._held for key in ARGUMENTS)
            self._status = "malformed" if meant_as_call else None
            return [self._held] if self._held else []
        self._status = "ok"
        return list(calls)


LLAMA3_JSON = ToolCallFormat(
    "llama3_json", (_LLAMA,), LlamaParser, lambda name: _json_start(name, "parameters")
)

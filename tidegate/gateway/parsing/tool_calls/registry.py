"""Lists the tool-call formats and detects the format of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import orjson

from tidegate.errors import ConfigError
from tidegate.gateway.errors import ApiError
from tidegate.gateway.parsing.parts import Part, PlainParser, ToolCall
from tidegate.gateway.parsing.tool_calls import (
    deepseek_v3,
    glm45,
    granite,
    hermes,
    kimi_k2,
    llama3_json,
    mistral,
    qwen3_coder,
)
from tidegate.gateway.parsing.tool_calls.base import ToolCallFormat, Tools
from tidegate.types import Message

NONE = ToolCallFormat("none", (), lambda _: PlainParser())
FORMATS = {
    module.FORMAT.name: module.FORMAT
    for module in (hermes, qwen3_coder, glm45, deepseek_v3, kimi_k2, llama3_json, mistral, granite)
}
MARKERS = tuple(dict.fromkeys(marker for tool_format in FORMATS.values() for marker in tool_format.markers))
_DEFAULT = hermes.FORMAT
_ARGUMENTS = {"place": "Oslo", "days": 3}
_TOOL = {
    "type": "function",
    "function": {
        "name": "forecast",
        "description": "The weather to come.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
        },
    },
}
_CALL = {
    "id": "call_0123456789abcdef",
    "type": "function",
    "function": {"name": "forecast", "arguments": _ARGUMENTS},
}
_ASKED: list[Message] = [{"role": "user", "content": "How will it be in Oslo?"}]
_CALLED: Message = {"role": "assistant", "content": "", "tool_calls": [_CALL]}


class FormatChoice(NamedTuple):
    """A format and the reason for its choice."""

    format: ToolCallFormat
    reason: str


Write = Callable[[list[Message], Any, dict[str, Any], bool], str]
"""`Renderer.render_text`."""


def choose(name: str, write: Write) -> FormatChoice:
    """Return the format `name`; for `auto`, the one that parses the call that the chat template renders.

    Raises ConfigError if the name is unknown.
    """
    if name == "none":
        return FormatChoice(NONE, "as set")
    if name in FORMATS:
        return FormatChoice(FORMATS[name], "as set")
    if name != "auto":
        raise ConfigError(f"tool_parser = {name!r} is unknown; use one of auto, {', '.join(FORMATS)}, none")
    try:
        written = _written(write)
    except ApiError:
        return FormatChoice(_DEFAULT, "by default: the chat template rejects tool calls")
    for tool_format in FORMATS.values():
        if _reads(tool_format, written):
            return FormatChoice(tool_format, "it parses the calls that the chat template renders")
    return FormatChoice(_DEFAULT, "by default: no format parses the calls that the chat template renders")


def _written(write: Write) -> str:
    """A past call as the template renders it, including the end of the reply."""
    prompt = write(_ASKED, [_TOOL], {}, True)
    full = write([*_ASKED, _CALLED], [_TOOL], {}, False)
    pairs = enumerate(zip(prompt, full, strict=False))
    shared = next((at for at, (a, b) in pairs if a != b), min(len(prompt), len(full)))
    if shared < len(prompt):  # the prompt ends differently, perhaps with a token of the same beginning
        shared = max(0, full.rfind("<", 0, shared))
    return full[shared:]


def _reads(tool_format: ToolCallFormat, text: str) -> bool:
    """Whether the format parses the call, trying to cut the text after each closing bracket."""
    for end in (len(text), *(at for at in range(len(text), 0, -1) if text[at - 1] in "}]")):
        calls = [part for part in _parse(tool_format, text[:end], [_TOOL]) if isinstance(part, ToolCall)]
        if [(call.name, orjson.loads(call.arguments)) for call in calls] == [("forecast", _ARGUMENTS)]:
            return True
    return False


def _parse(tool_format: ToolCallFormat, text: str, tools: Tools) -> list[Part]:
    parser = tool_format.parser(tools)
    return [*parser.feed(text), *parser.finish()]

"""Lists the tool-call formats and detects the format of a model.

The settings import this module for the names, so it imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import orjson

from tidegate.errors import ConfigError
from tidegate.gateway.errors import ApiError
from tidegate.gateway.parsing.reply import PlainParser, SampledCall, call_wire, function_tool
from tidegate.gateway.parsing.tool_calls import json_formats, tagged_formats
from tidegate.gateway.parsing.tool_calls.base import ToolCallFormat

NONE = ToolCallFormat("none", (), lambda _: PlainParser())
FORMATS = {
    tool_format.name: tool_format
    for tool_format in (
        json_formats.HERMES,
        tagged_formats.QWEN3_CODER,
        tagged_formats.GLM45,
        json_formats.DEEPSEEK_V3,
        json_formats.KIMI_K2,
        json_formats.LLAMA3_JSON,
        json_formats.MISTRAL,
        json_formats.GRANITE,
    )
}
"""The formats; `auto` selects the first one that fits."""
TOOL_PARSERS = ("auto", *FORMATS, NONE.name)
MARKERS = tuple(dict.fromkeys(marker for tool_format in FORMATS.values() for marker in tool_format.markers))
_DEFAULT = json_formats.HERMES
_ARGUMENTS = {"place": "Oslo", "days": 3}
_TOOL = function_tool("forecast", "The weather to come.", place="string", days="integer")
_ASKED = {"role": "user", "content": "How will it be in Oslo?"}
_CALL = call_wire("call_0123456789abcdef", "forecast", _ARGUMENTS)
_CALLED = {"role": "assistant", "content": "", "tool_calls": [_CALL]}


class FormatChoice(NamedTuple):
    """A format and the reason for its choice."""

    format: ToolCallFormat
    reason: str


Write = Callable[[list[dict[str, Any]], Any, dict[str, Any], bool], str]
"""`Renderer.render_text`."""


def choose(name: str, write: Write) -> FormatChoice:
    """Returns the format `name`; for `auto`, the one that parses the call that the chat template renders.
    Raises ConfigError if the name is unknown."""
    if name not in TOOL_PARSERS:
        raise ConfigError(f"tool_parser = {name!r} is unknown; use one of {', '.join(TOOL_PARSERS)}")
    if name != "auto":
        return FormatChoice(FORMATS.get(name, NONE), "as set")
    try:
        written = _written(write)
    except ApiError:
        return FormatChoice(_DEFAULT, "by default: the chat template rejects tool calls")
    for tool_format in FORMATS.values():
        if _reads(tool_format, written):
            return FormatChoice(tool_format, "it parses the calls that the chat template renders")
    return FormatChoice(_DEFAULT, "by default: no format parses the calls that the chat template renders")


def _written(write: Write) -> str:
    """Returns a past call as the template renders it, including the end of the reply."""
    prompt = write([_ASKED], [_TOOL], {}, True)
    full = write([_ASKED, _CALLED], [_TOOL], {}, False)
    pairs = enumerate(zip(prompt, full, strict=False))
    shared = next((at for at, (a, b) in pairs if a != b), min(len(prompt), len(full)))
    if shared < len(prompt):  # the prompt ends differently, perhaps with a token of the same beginning
        shared = max(0, full.rfind("<", 0, shared))
    return full[shared:]


def _reads(tool_format: ToolCallFormat, text: str) -> bool:
    """Returns whether the format parses the call, trying to cut the text after each closing bracket."""
    for end in (len(text), *(at for at in range(len(text), 0, -1) if text[at - 1] in "}]")):
        parser = tool_format.parser([_TOOL])
        parts = [*parser.feed(text[:end]), *parser.finish()]
        calls = [part for part in parts if isinstance(part, SampledCall)]
        if [(call.name, orjson.loads(call.arguments)) for call in calls] == [("forecast", _ARGUMENTS)]:
            return True
    return False

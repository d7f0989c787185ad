"""All forms by name, and which of them a model writes."""

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
FORMS = {
    module.FORM.name: module.FORM
    for module in (hermes, qwen3_coder, glm45, deepseek_v3, kimi_k2, llama3_json, mistral, granite)
}
MARKERS = tuple(dict.fromkeys(marker for form in FORMS.values() for marker in form.markers))
_DEFAULT = hermes.FORM
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
    """A form, and why it is that one."""

    form: ToolCallFormat
    why: str


Write = Callable[[list[Message], Any, dict[str, Any], bool], str]
"""`Renderer.write`."""


def choose(name: str, write: Write) -> FormatChoice:
    """The form called `name`; of `auto`, the one that reads back the call that the template writes.

    Raises ConfigError for a name that is none.
    """
    if name == "none":
        return FormatChoice(NONE, "as set")
    if name in FORMS:
        return FormatChoice(FORMS[name], "as set")
    if name != "auto":
        raise ConfigError(f"tool_parser = {name!r}: it is one of auto, {', '.join(FORMS)}, none")
    try:
        written = _written(write)
    except ApiError:
        return FormatChoice(_DEFAULT, "by default: the chat template takes no calls")
    for form in FORMS.values():
        if _reads(form, written):
            return FormatChoice(form, "it reads back the call that the chat template writes")
    return FormatChoice(_DEFAULT, "by default: the chat template writes no call that any known form reads")


def _written(write: Write) -> str:
    """A past call as the template writes it, with what it ends replies with."""
    prompt = write(_ASKED, [_TOOL], {}, True)
    full = write([*_ASKED, _CALLED], [_TOOL], {}, False)
    pairs = enumerate(zip(prompt, full, strict=False))
    shared = next((at for at, (a, b) in pairs if a != b), min(len(prompt), len(full)))
    if shared < len(prompt):  # the prompt goes on otherwise, perhaps with a token that begins alike
        shared = max(0, full.rfind("<", 0, shared))
    return full[shared:]


def _reads(form: ToolCallFormat, text: str) -> bool:
    """Whether the form finds the call; what ends the reply may be taken for text, or may have to go."""
    for end in (len(text), *(at for at in range(len(text), 0, -1) if text[at - 1] in "}]")):
        calls = [part for part in _parse(form, text[:end], [_TOOL]) if isinstance(part, ToolCall)]
        if [(one.name, orjson.loads(one.arguments)) for one in calls] == [("forecast", _ARGUMENTS)]:
            return True
    return False


def _parse(form: ToolCallFormat, text: str, tools: Tools) -> list[Part]:
    parser = form.parser(tools)
    return [*parser.feed(text), *parser.finish()]

"""What a reply is made of, and tool calls as the model writes them.

Hermes form (also Qwen's): `<tool_call>\\n{"name": …, "arguments": {…}}\\n</tool_call>`, any number of
times, with text around it. Parsers take text piece by piece and give content and calls as soon as they
are certain; a call that is malformed or never closed stays content, and `status` says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

import orjson

from tidegate.gateway.refusal import unsupported

ToolParser = Literal["hermes", "none"]
OPEN, CLOSE = "<tool_call>", "</tool_call>"


class ToolCall(NamedTuple):
    """A call that was read; `arguments` is JSON text, as the OpenAI form has it."""

    name: str
    arguments: str


class Reasoning(NamedTuple):
    """A piece of what the model thought before it answered."""

    text: str


Part = str | Reasoning | ToolCall
"""A piece of content, a piece of reasoning, or a whole call."""


class Parser(Protocol):
    """Reads one reply, piece by piece."""

    @property
    def status(self) -> str | None:
        """How its calls were read, see `Turn.parse`."""

    def feed(self, text: str) -> list[Part]:
        """More text; the parts that are certain now."""

    def finish(self) -> list[Part]:
        """The text is over; what is left of it."""


class ToolUse(NamedTuple):
    """How a reply may use tools; `name` is the tool that it must call."""

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None
    parallel: bool = True


def forced_start(parser: ToolParser, use: ToolUse) -> str:
    """The text that a reply is made to start with so that it is a call; empty where it need not be one.

    It ends where the model's own tokens would: before the space that begins the next one. Raises Refusal
    where the family's calls have no such start.
    """
    if use.mode != "required":
        return ""
    if parser != "hermes":
        raise unsupported("tool_choice", "only 'auto' and 'none' are supported with this model's tool calls")
    start = OPEN + '\n{"name":'
    return start if use.name is None else f'{start} {orjson.dumps(use.name).decode()}, "arguments":'


def single_call_stop(parser: ToolParser, use: ToolUse) -> str | None:
    """The text at which a reply with at most one call ends; None where there may be more of them.

    Raises Refusal where the family's calls have no such end.
    """
    if use.parallel or use.mode == "none":
        return None
    if parser != "hermes":
        raise unsupported("parallel_tool_calls", "false is not supported with this model's tool calls")
    return CLOSE


class PlainParser:
    """Everything is content."""

    def __init__(self) -> None:
        self.status: str | None = None

    def feed(self, text: str) -> list[Part]:
        return [text] if text else []

    def finish(self) -> list[Part]:
        return []


class HermesParser:
    """Reads `<tool_call>` blocks. Whitespace between content and a call belongs to neither."""

    def __init__(self) -> None:
        self.status: str | None = None
        self._buffer = ""
        self._blank = ""  # whitespace that is content only if content follows
        self._inside = False
        self._called = False

    def feed(self, text: str) -> list[Part]:
        self._buffer += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        if self._inside:
            self._malformed(parts, OPEN + self._buffer)
        else:
            self._content(parts, self._buffer)
        self._buffer = ""
        if self._blank and not self._called:
            parts.append(self._blank)
        self._blank = ""
        return parts

    def _step(self, parts: list[Part]) -> bool:
        """Consume up to the next marker; whether there may be more to do."""
        marker = CLOSE if self._inside else OPEN
        before, found, after = self._buffer.partition(marker)
        if not found:
            if not self._inside:
                keep = partial_suffix(self._buffer, OPEN)
                self._content(parts, self._buffer[: len(self._buffer) - keep])
                self._buffer = self._buffer[len(self._buffer) - keep :]
            return False
        self._buffer = after
        if self._inside:
            call = read_call(before)
            if call is None:
                self._malformed(parts, OPEN + before + CLOSE)
            else:
                self._called = True
                self.status = self.status or "ok"
                parts.append(call)
        else:
            self._content(parts, before)
        self._inside = not self._inside
        return True

    def _content(self, parts: list[Part], text: str) -> None:
        solid = text.rstrip()
        if solid:
            parts.append(self._blank + solid)
            self._blank = text[len(solid) :]
        else:
            self._blank += text

    def _malformed(self, parts: list[Part], text: str) -> None:
        self.status = "malformed"
        self._content(parts, text)


PARSERS: dict[str, Callable[[], Parser]] = {"hermes": HermesParser, "none": PlainParser}


def read_call(text: str) -> ToolCall | None:
    """One call from the JSON between the markers, None where it is malformed."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError:
            return None
    if not isinstance(arguments, dict):
        return None
    return ToolCall(value["name"], orjson.dumps(arguments).decode())


def partial_suffix(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the beginning of `marker`."""
    at = text.rfind("<", max(0, len(text) - len(marker) + 1))
    while at >= 0:
        if marker.startswith(text[at:]):
            return len(text) - at
        at = text.rfind("<", max(0, len(text) - len(marker) + 1), at)
    return 0

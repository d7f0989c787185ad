"""What a reply is made of, and what reads it.

Parsers take text piece by piece and give content and calls as soon as they are certain; a call that is
malformed or never closed stays content, and `status` says so. The forms in which models write calls are in
`tidegate.gateway.parsing.tool_calls`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol


class ToolCall(NamedTuple):
    """A call that was read; `arguments` is JSON text, as the OpenAI form has it."""

    name: str
    arguments: str


class Reasoning(NamedTuple):
    """A piece of what the model thought before it answered."""

    text: str


Part = str | Reasoning | ToolCall
"""A piece of content, a piece of reasoning, or a whole call."""


class ReplyParser(Protocol):
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


class PlainParser:
    """Everything is content."""

    def __init__(self) -> None:
        self.status: str | None = None

    def feed(self, text: str) -> list[Part]:
        return [text] if text else []

    def finish(self) -> list[Part]:
        return []


def partial_suffix(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the beginning of `marker`."""
    first, least = marker[0], max(0, len(text) - len(marker) + 1)
    at = text.find(first, least)
    while at >= 0:
        if marker.startswith(text[at:]):
            return len(text) - at
        at = text.find(first, at + 1)
    return 0

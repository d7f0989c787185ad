"""Defines the parts of a reply and the interface of reply parsers.

Parsers take text incrementally and return content and calls as soon as they are certain. A malformed or
unclosed call stays content, which `status` reports. Tool-call formats are in
`tidegate.gateway.parsing.tool_calls`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol


class SampledCall(NamedTuple):
    """A parsed call; `arguments` is JSON text, as in the OpenAI API."""

    name: str
    arguments: str


class Reasoning(NamedTuple):
    """A piece of the model's reasoning."""

    text: str


Part = str | Reasoning | SampledCall
"""A piece of content, a piece of reasoning, or a complete call."""


class ReplyParser(Protocol):
    """Parses one reply incrementally."""

    @property
    def status(self) -> str | None:
        """The result of parsing the calls, see `Turn.parse`."""

    def feed(self, text: str) -> list[Part]:
        """Add text; returns the parts that are certain now."""

    def finish(self) -> list[Part]:
        """End the text; returns the remaining parts."""


class ToolUse(NamedTuple):
    """The tool choice of a request; `name` is the tool that the reply must call."""

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None
    parallel: bool = True


class PlainParser:
    """Returns all text as content."""

    def __init__(self) -> None:
        self.status: str | None = None

    def feed(self, text: str) -> list[Part]:
        return [text] if text else []

    def finish(self) -> list[Part]:
        return []


def call_wire(key: str, name: str, arguments: Any) -> dict[str, Any]:
    """Returns a tool call in the form of the OpenAI API (arguments as text) or of chat templates (a dict)."""
    return {"id": key, "type": "function", "function": {"name": name, "arguments": arguments}}


def function_tool(name: str, description: str, **types: str) -> dict[str, Any]:
    """Returns the definition of a tool; `types` are the JSON types of its parameters."""
    properties = {parameter: {"type": kind} for parameter, kind in types.items()}
    parameters = {"type": "object", "properties": properties}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def partial_suffix(text: str, marker: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `marker`."""
    first, least = marker[0], max(0, len(text) - len(marker) + 1)
    at = text.find(first, least)
    while at >= 0:
        if marker.startswith(text[at:]):
            return len(text) - at
        at = text.find(first, at + 1)
    return 0


def find_first(text: str, markers: Sequence[str]) -> tuple[int, str | None]:
    """Returns the position of the first marker in a text, and the marker; without one, the number of
    characters before a possible beginning of one, and None."""
    matches = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    if matches:
        return min(matches)
    return len(text) - max((partial_suffix(text, marker) for marker in markers), default=0), None

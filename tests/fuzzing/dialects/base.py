"""Interface of a dialect for the fuzzer."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}}
QUESTIONS = [
    "?",
    "What is 2 + 2?",
    "  spaced  ",
    "line\nbreak",
    "é🍎",
    "<tool_call>{}</tool_call>",
    "a" * 300,
]
RESULTS = ["42", "", "error"]


@dataclass(slots=True)
class Answer:
    """A reply as the client understood it."""

    id: str
    """The gateway's own id of the turn, without the dialect's prefix."""
    text: str
    calls: list[tuple[str, str]]
    """Name and arguments of each tool call."""
    items: list[Any]
    """What the client puts into its history for it."""
    more: int = 0
    """Further replies that came with it."""


class Dialect(Protocol):
    name: str
    path: str

    def question(self, rng: random.Random, history: list[Any]) -> list[Any]:
        """What the client says next, in items of the history."""
        ...

    def body(self, rng: random.Random, history: list[Any]) -> dict[str, Any]: ...

    def whole(self, payload: Any) -> Answer: ...

    def streamed(self, data: bytes) -> Answer | None:
        """What the events add up to; None where they don't end as they should."""
        ...

    def complaint(self, payload: Any) -> str:
        """The message of an error; raises where it does not have the dialect's shape."""
        ...


def events(data: bytes) -> Iterator[Any]:
    """The payloads of an event stream but for `[DONE]`; comments are skipped."""
    for event in data.split(b"\n\n"):
        for line in event.split(b"\n"):
            if line.startswith(b"data: ") and line != b"data: [DONE]":
                yield json.loads(line.removeprefix(b"data: "))

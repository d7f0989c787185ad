"""Defines the interface of a dialect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from tidegate.gateway.errors import ApiError
from tidegate.gateway.parsing.parts import Part, Reasoning
from tidegate.gateway.request import TurnRequest
from tidegate.gateway.sessions.pending_turns import PendingTurn
from tidegate.gateway.sessions.session import GatewaySession


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Properties of the served model that replies need."""

    name: str
    token_text: Callable[[int], str]
    thought_end: int | None
    """Token id that ends reasoning, if the model has one."""


class Usage(NamedTuple):
    """Token counts of one request."""

    prompt: int
    cached: int
    output: int
    reasoning: int

    @classmethod
    def of(cls, calls: Sequence[PendingTurn], model: ServedModel, choices: int = 1) -> Usage:
        """Sums finished calls, of which every `choices` consecutive ones share a prompt."""
        turns = [call.node.turn for call in calls if call.node is not None]
        return cls(
            sum(call.prompt_tokens for call in calls[::choices]),
            sum(turn.cached_tokens for turn in turns[::choices]),
            sum(len(turn.output_ids) for turn in turns),
            sum(_reasoning(turn.output_ids.tolist(), model.thought_end) for turn in turns),
        )


def _reasoning(ids: list[int], end: int | None) -> int:
    return ids.index(end) + 1 if end is not None and end in ids else 0


def merged(parts: Sequence[Part]) -> list[Part]:
    """Joins adjacent parts of the same kind, except tool calls."""
    result: list[Part] = []
    for part in parts:
        last = result[-1] if result else None
        if isinstance(last, str) and isinstance(part, str):
            result[-1] = last + part
        elif isinstance(last, Reasoning) and isinstance(part, Reasoning):
            result[-1] = Reasoning(last.text + part.text)
        else:
            result.append(part)
    return result


class Events(Protocol):
    """Formats the stream of one request as bytes."""

    ping: bytes
    """Keep-alive message."""

    def start(self) -> bytes: ...

    def part(self, choice: int, part: Part) -> bytes: ...

    def end(self) -> bytes:
        """Ends the stream after all calls are done."""

    def error(self, refusal: ApiError) -> bytes:
        """Ends the stream with an error."""


class ParsedRequest(Protocol):
    """A parsed body: the replies that it requests and the format of its response."""

    @property
    def turn_requests(self) -> Sequence[TurnRequest]:
        """One request for each reply."""

    @property
    def stream(self) -> bool: ...

    def body(self, calls: Sequence[PendingTurn], model: ServedModel) -> bytes:
        """Returns the response body; the calls, one for each of `turn_requests`, are done."""

    def events(self, calls: Sequence[PendingTurn], model: ServedModel) -> Events: ...


class Dialect(Protocol):
    """A module of this package."""

    __name__: str

    def read(self, payload: dict[str, Any], session: GatewaySession) -> ParsedRequest:
        """Parses a body. Raises ApiError that names an unsupported parameter or content."""

    def error(self, refusal: ApiError) -> bytes:
        """Returns the body of an error response."""

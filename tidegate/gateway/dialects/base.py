"""Defines the interface of a dialect, and reads what all of them need from a reply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from tidegate.gateway.errors import ApiError
from tidegate.gateway.parsing.reply import Part, Reasoning, SampledCall
from tidegate.gateway.sessions.model_calls import ModelCall, TurnRequest
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
    def of(cls, calls: Sequence[ModelCall], model: ServedModel, choices: int = 1) -> Usage:
        """Sums finished calls, of which every `choices` consecutive ones share a prompt."""
        turns = [call.recorded.turn for call in calls]
        replies, end = [turn.output_ids.tolist() for turn in turns], model.thought_end
        return cls(
            sum(call.prompt_tokens for call in calls[::choices]),
            sum(turn.cached_tokens for turn in turns[::choices]),
            sum(map(len, replies)),
            sum(ids.index(end) + 1 for ids in replies if end in ids),
        )


def finish_reason(call: ModelCall) -> Literal["length", "tool_calls", "stop"]:
    """Returns the finish reason of a reply, as in Chat Completions."""
    # A stop string may end in the last token that the limit allows.
    if call.recorded.turn.finish_reason == "length" and not call.reader.stopped:
        return "length"
    return "tool_calls" if call.recorded.reply.get("tool_calls") else "stop"


def blocks(call: ModelCall) -> list[tuple[Part, str]]:
    """Returns a reply's parts, adjacent text and reasoning joined, with the id of each tool call."""
    result: list[tuple[Part, str]] = []
    call_ids = iter(call.reader.call_ids)
    for part in call.reader.parts:
        last = result[-1][0] if result else None
        if isinstance(last, str) and isinstance(part, str):
            result[-1] = (last + part, "")
        elif isinstance(last, Reasoning) and isinstance(part, Reasoning):
            result[-1] = (Reasoning(last.text + part.text), "")
        else:
            result.append((part, next(call_ids) if isinstance(part, SampledCall) else ""))
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

    def body(self, calls: Sequence[ModelCall], model: ServedModel) -> bytes:
        """Returns the response body; the calls, one for each of `turn_requests`, are done."""

    def events(self, calls: Sequence[ModelCall], model: ServedModel) -> Events: ...


class Dialect(Protocol):
    """A module of this package."""

    __name__: str

    def read(self, payload: dict[str, Any], session: GatewaySession) -> ParsedRequest:
        """Parses a body. Raises ApiError that names an unsupported parameter or content."""

    def error(self, refusal: ApiError) -> bytes:
        """Returns the body of an error response."""

"""What every dialect is to the data plane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from tidegate.gateway.errors import ApiError
from tidegate.gateway.parsing.parts import Part, Reasoning
from tidegate.gateway.request import TurnRequest
from tidegate.gateway.sessions.calls import PendingTurn
from tidegate.gateway.sessions.session import GatewaySession


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What replies say of the model."""

    name: str
    token_text: Callable[[int], str]
    thought_end: int | None
    """The id that ends reasoning, where the model has one."""


class Usage(NamedTuple):
    """Tokens of one request."""

    prompt: int
    cached: int
    output: int
    reasoning: int

    @classmethod
    def of(cls, calls: Sequence[PendingTurn], model: ServedModel, choices: int = 1) -> Usage:
        """Of finished calls, of which each `choices` share a prompt."""
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
    """The parts of a reply with neighbours of one kind made one; calls stay apart."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(last, str) and isinstance(part, str):
            found[-1] = last + part
        elif isinstance(last, Reasoning) and isinstance(part, Reasoning):
            found[-1] = Reasoning(last.text + part.text)
        else:
            found.append(part)
    return found


class Events(Protocol):
    """The stream of one request, as bytes; made when its calls begin."""

    ping: bytes
    """What keeps a connection alive and means nothing."""

    def start(self) -> bytes: ...

    def part(self, choice: int, part: Part) -> bytes: ...

    def end(self) -> bytes:
        """All calls are done."""

    def error(self, refusal: ApiError) -> bytes:
        """The stream ends with an error."""


class ParsedRequest(Protocol):
    """A body that was understood: what it asks for, and the form of its answer."""

    @property
    def asks(self) -> Sequence[TurnRequest]:
        """One for each reply that is wanted."""

    @property
    def stream(self) -> bool: ...

    def whole(self, calls: Sequence[PendingTurn], model: ServedModel) -> bytes:
        """The body of the answer; the calls, one for each of `asks`, are done."""

    def events(self, calls: Sequence[PendingTurn], model: ServedModel) -> Events: ...


class Dialect(Protocol):
    """A module of this package."""

    __name__: str

    def read(self, payload: dict[str, Any], session: GatewaySession) -> ParsedRequest:
        """Understand a body. Raises Refusal that names what cannot be honoured."""

    def error(self, refusal: ApiError) -> bytes:
        """The body of an answer that refuses."""

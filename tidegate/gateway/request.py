"""The one internal form of a request for a reply."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from tidegate.gateway.parsing.parts import ToolUse
from tidegate.gateway.sampling import RequestedSampling
from tidegate.types import Message

RawBody = bytes | bytearray
"""A request's body as it came."""


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """What every dialect is translated to."""

    messages: list[Message]
    wishes: RequestedSampling = field(default_factory=RequestedSampling)
    tools: list[Any] | None = None
    tool_use: ToolUse = field(default_factory=ToolUse)
    template_options: dict[str, Any] = field(default_factory=dict)
    prompt: str | list[int] | None = None
    """What goes to the engine as it is, instead of messages."""
    parent: int | None = None
    """The turn that it says it continues: one of those that read alike."""
    stream: bool = False
    digest: bytes = b""
    """Of the request's body."""
    idempotency_key: str | None = None
    exempt: str | None = None
    """Why its turn is not trained on."""
    retry: bool = False
    """The client says that it sends this again."""


def digest_of(place: bytes, body: RawBody) -> bytes:
    """Of a body, and of the place in its request that an ask has."""
    digest = blake2b(place, digest_size=16)
    digest.update(body)
    return digest.digest()

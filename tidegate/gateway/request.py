"""Defines the internal request to which every dialect is translated."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from hashlib import blake2b
from typing import Any

from tidegate.gateway.parsing.parts import ToolUse
from tidegate.gateway.sampling import RequestedSampling
from tidegate.types import Message

RawBody = bytes | bytearray
"""An unparsed request body."""


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A request for one reply, independent of its dialect."""

    messages: list[Message]
    sampling: RequestedSampling = field(default_factory=RequestedSampling)
    tools: list[Any] | None = None
    tool_use: ToolUse = field(default_factory=ToolUse)
    template_options: dict[str, Any] = field(default_factory=dict)
    prompt: str | list[int] | None = None
    """Raw prompt, sent to the engine unchanged, instead of messages."""
    parent: int | None = None
    """Turn that the request names as its predecessor, which decides between turns with equal histories."""
    stream: bool = False
    _: KW_ONLY
    digest: bytes = b""
    """Hash of the request's position and body, by which a retry is recognised."""
    idempotency_key: str | None = None
    exempt: str | None = None
    """Reason that its turn is not trained on; None if it is."""
    policy: str = ""
    """Name of the policy that it chose; empty if there is one only."""
    retry: bool = False
    """The client marked the request as a retry."""


def digest_of(position: bytes, body: RawBody) -> bytes:
    """Hashes a body and the position of one TurnRequest in it."""
    digest = blake2b(position, digest_size=16)
    digest.update(body)
    return digest.digest()

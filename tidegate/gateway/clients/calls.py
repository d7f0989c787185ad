"""Reads the fields of a call that identify its conversation."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from tidegate.gateway.dialects.base import Dialect
from tidegate.gateway.errors import ApiError
from tidegate.gateway.sessions.history import RequestHistories
from tidegate.gateway.sessions.model_calls import RawBody, TurnRequest, digest_of
from tidegate.gateway.sessions.session import GatewaySession
from tidegate.gateway.turns.request_reader import LARGE, parse, parse_large

SESSION_HEADER = b"x-tidegate-session"
MAX_NAME = 200
_ID_LENGTH = 32


@dataclass(frozen=True, slots=True)
class ClientCall:
    """A call with a project key."""

    name: str | None
    """Name of the conversation, if the call gives one."""
    previous: str | None
    """Id of the reply that it names as its predecessor, if it does (Responses)."""
    digest: bytes
    """Digest of its first request, which a retry repeats."""
    retry: bool
    """Whether it may repeat an earlier call."""
    replies: list[bytes] = field(default_factory=list)
    """Hashes of its history up to each reply in it, the longest first; with several policies for each."""


def read_call(
    dialect: Dialect,
    body: RawBody,
    headers: Mapping[bytes, bytes],
    probe: GatewaySession,
    policies: Collection[str] = ("",),
) -> ClientCall:
    """Read a call to one of these policies; `probe` is a session without turns. Raises ApiError. A large
    body needs a thread."""
    payload = parse(body) if len(body) <= LARGE else parse_large(body)
    name, previous = _name(payload, headers), payload.get("previous_response_id")
    digest = digest_of(b"%s/0/" % dialect.__name__.encode(), body)
    retries = headers.get(b"x-stainless-retry-count", b"0")
    retry = b"idempotency-key" in headers or retries.strip(b"0") != b""
    if isinstance(previous, str):
        return ClientCall(name, previous.removeprefix("resp_")[:_ID_LENGTH], digest, retry)
    if name is not None:
        return ClientCall(name, None, digest, retry)
    request, model = dialect.read(payload, probe).turn_requests[0], payload.get("model")
    # The conversation may have the history of the named policy, or that of another one, which it quotes.
    own_first = sorted(policies, key=lambda name: name != model)
    return ClientCall(
        None, None, digest, retry, [one for name in own_first for one in _replies(request, name)]
    )


def _name(payload: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> str | None:
    """Returns the name in the header, or the `session_id` in the body's `metadata`."""
    metadata = payload.get("metadata")
    named = metadata.get("session_id") if isinstance(metadata, dict) else None
    header = headers.get(SESSION_HEADER)
    name = named if header is None else header.decode("latin-1")
    if name is None:
        return None
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise ApiError(
            f"a conversation's name ({SESSION_HEADER.decode()}, or metadata.session_id) is a text of 1 to "
            f"{MAX_NAME} characters"
        )
    return name


def _replies(request: TurnRequest, policy: str) -> list[bytes]:
    if request.prompt is not None:
        return []
    histories = RequestHistories()
    history = histories.add_request(request.messages, request.tools, request.template_options, policy)
    pairs = zip(history.hashes, history.messages, strict=True)
    return [hashed for hashed, message in pairs if message["role"] == "assistant"][::-1]

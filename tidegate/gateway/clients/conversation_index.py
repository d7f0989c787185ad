"""Finds the conversation that a call belongs to, by its name, reply, history or first request."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
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
Key = tuple[str, object]
"""Client, and what identifies a reply or a conversation among the client's."""


@dataclass(eq=False, slots=True)
class Conversation:
    """A conversation that has not ended."""

    session: GatewaySession
    client: str
    used: float
    """Time of its last call or feedback, on the event loop's clock."""
    indexed: int = 0
    """Number of its turns that the index has."""
    keys: list[Key] = field(default_factory=list)
    """Its keys in the index."""
    failures: int = 0
    """Number of tries to end it that failed."""
    again: float = 0.0
    """Time of the next try."""


class ConversationIndex:
    """The conversations of all clients. A client finds only its own."""

    def __init__(self) -> None:
        self.open: dict[str, Conversation] = {}
        """By session id."""
        self._by_name: dict[Key, Conversation] = {}
        self._by_reply: dict[Key, tuple[Conversation, int]] = {}
        """By reply id: the conversation and the index of the turn."""
        self._by_history: dict[Key, list[Conversation]] = {}
        """By the hash of a history that ends in a reply: the conversations that have it, oldest first."""
        self._by_digest: dict[Key, Conversation] = {}
        """By the digest of a first request, which its retry repeats."""

    def add(self, session: GatewaySession, client: str, now: float) -> Conversation:
        """Add a conversation that begins or is restored."""
        conversation = self.open[session.id] = Conversation(session, client, now)
        if session.conversation:
            self._add_key(conversation, self._by_name, session.conversation, conversation)
        return conversation

    def add_first_request(self, conversation: Conversation, digest: object) -> None:
        """Add a conversation's first request, before its turn is recorded."""
        self._add_key(conversation, self._by_digest, digest, conversation)

    def add_turns(self, conversation: Conversation) -> None:
        """Add the turns that were recorded since the last call."""
        nodes = conversation.session.tree.nodes
        for index in range(conversation.indexed, len(nodes)):
            node = nodes[index]
            if node.request.id:
                self._add_key(conversation, self._by_reply, node.request.id, (conversation, index))
            if index == 0:
                self.add_first_request(conversation, node.request.digest)
            if node.reply_hash:
                key = (conversation.client, node.reply_hash)
                conversation.keys.append(key)
                self._by_history.setdefault(key, []).append(conversation)
        conversation.indexed = len(nodes)

    def _add_key(self, conversation: Conversation, index: dict[Key, Any], key: object, value: object) -> None:
        conversation.keys.append((conversation.client, key))
        index[conversation.client, key] = value

    def remove(self, conversation: Conversation) -> None:
        """Remove a conversation, if it was not removed before."""
        if self.open.pop(conversation.session.id, None) is None:
            return
        for key in conversation.keys:
            for index in (self._by_name, self._by_digest):
                if index.get(key) is conversation:  # not one that began since with the same name or words
                    del index[key]
            if (reply := self._by_reply.get(key)) is not None and reply[0] is conversation:
                del self._by_reply[key]
            if having := self._by_history.get(key):
                having[:] = [one for one in having if one is not conversation]
                if not having:
                    del self._by_history[key]

    def named(self, client: str, name: str) -> Conversation | None:
        """Return the conversation with this name."""
        return self._by_name.get((client, name))

    def reply(self, client: str, reply_id: str) -> tuple[Conversation, int] | None:
        """Return the conversation with a reply of this id, and the index of its turn."""
        return self._by_reply.get((client, reply_id))

    def about(self, client: str, about: str) -> Conversation | None:
        """Return the conversation with a reply of this id, prefixed or not, or with this name."""
        reply = self.reply(client, bare_reply_id(about))
        return self.named(client, about) if reply is None else reply[0]

    def beginning_with(self, client: str, digest: object) -> Conversation | None:
        """Return the newest conversation with this first request."""
        return self._by_digest.get((client, digest))

    def extended(self, client: str, replies: Sequence[bytes]) -> Iterator[Conversation]:
        """Yield the conversations that have one of these histories, the best first.

        Those of an earlier reply in `replies` come first, of these the ones whose newest reply it is.
        """
        for reply in replies:
            having = self._by_history.get((client, reply), [])
            yield from sorted(having, key=lambda one: one.session.tree.nodes[-1].reply_hash != reply)


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


def bare_reply_id(about: str) -> str:
    """Return a reply's id without the prefix that its dialect gives it."""
    return about.rpartition("-")[2].rpartition("_")[2]

"""Conversations that have not ended, found by name, reply, history or first request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidegate.gateway.sessions.session import GatewaySession

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


def bare_reply_id(about: str) -> str:
    """Return a reply's id without the prefix that its dialect gives it."""
    return about.rpartition("-")[2].rpartition("_")[2]

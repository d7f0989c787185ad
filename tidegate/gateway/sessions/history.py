"""Caches the newest request histories of a session, so that only new messages are hashed, and names what
distinguishes a branch from them.

Every request repeats its conversation, one turn longer. A session may have several conversations in parallel
(a main agent and its sub-agents), so several histories are kept; a request continues the one with which it
shares most messages. Shared messages are stored once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tidegate.gateway.rendering.messages import chain, root_key, template_form
from tidegate.types import Message

MAX_HISTORIES = 32
"""Histories kept for one session; a conversation that was evicted is hashed anew when it continues."""


@dataclass(eq=False, slots=True)
class RequestHistory:
    """One request; `hashes[i]` is the hash of its history up to `messages[i]`."""

    tools_hash: bytes
    tools: Any = None
    options: Any = None
    messages: list[Message] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    policy: str = ""
    """Name of the policy that the request chose."""

    @property
    def history_hash(self) -> bytes:
        """Hash of the complete history."""
        return self.hashes[-1] if self.hashes else self.tools_hash

    def common_length(self, other: RequestHistory) -> int:
        """Returns the number of leading messages that both share, by meaning."""
        return _common(self.hashes, other.hashes)

    def adopt_recorded(self, start: int, recorded: Sequence[Message]) -> None:
        """Replaces the hashes from `start` on by those of `recorded`, which renders to the same text."""
        for index in range(start, len(self.messages)):
            at = index - start
            message = recorded[at] if at < len(recorded) else self.messages[index]
            history_hash = self.hashes[index - 1] if index else self.tools_hash
            self.hashes[index] = chain(history_hash, template_form(message, index))

    def equal_messages(self, messages: Sequence[Message]) -> int:
        """Returns the number of leading messages that are equal, spelling included."""
        own = self.messages
        # The usual request repeats all messages, which one comparison of lists finds fastest.
        return len(own) if messages[: len(own)] == own else _common(own, messages)


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (mine, theirs) in pairs if mine != theirs), min(len(one), len(other)))


class RequestHistories:
    """The request histories of one session, newest first."""

    def __init__(self) -> None:
        self._histories: list[RequestHistory] = []
        self._empty = RequestHistory(root_key(None, None))

    @property
    def newest(self) -> RequestHistory:
        return self._histories[0] if self._histories else self._empty

    def all(self) -> list[RequestHistory]:
        return list(self._histories)

    def __bool__(self) -> bool:
        return bool(self._histories)

    def add(self, history: RequestHistory) -> None:
        self._histories.insert(0, history)
        del self._histories[MAX_HISTORIES:]

    def restore(self, histories: list[RequestHistory]) -> None:
        self._histories = histories

    def drop_newest(self) -> None:
        del self._histories[:1]

    def add_request(
        self, messages: Sequence[Message], tools: Any, options: Any, policy: str = ""
    ) -> RequestHistory:
        """Adds a request. Raises ApiError, without any change, for messages that cannot be rendered."""
        newest = self.newest
        same = policy == newest.policy and tools == newest.tools and options == newest.options
        tools_hash = newest.tools_hash if same else root_key(tools, options, policy)
        nearest, shared = self._find_nearest(tools_hash, messages)
        hashes = nearest.hashes[:shared] if nearest is not None else []
        history_hash = hashes[-1] if hashes else tools_hash
        for index in range(shared, len(messages)):
            history_hash = chain(history_hash, template_form(messages[index], index))
            hashes.append(history_hash)
        stored = nearest.messages[:shared] if nearest is not None else []
        history = RequestHistory(tools_hash, tools, options, [*stored, *messages[shared:]], hashes, policy)
        # A branch keeps the earlier history: its conversation may continue, too.
        if nearest is not None and shared == len(nearest.messages):
            self._histories.remove(nearest)
        self.add(history)
        return history

    def _find_nearest(
        self, tools_hash: bytes, messages: Sequence[Message]
    ) -> tuple[RequestHistory | None, int]:
        """Returns the history that shares most leading messages with a request, and their number."""
        best, max_shared = None, 0
        for history in self._histories:
            if history.tools_hash != tools_hash:
                continue
            shared = history.equal_messages(messages)
            if shared > max_shared or best is None:
                best, max_shared = history, shared
        return best, max_shared


def branch_reason(
    history: RequestHistory, earlier: Sequence[RequestHistory], parent: int | None, start: int, newest: int
) -> str:
    """Names the first difference from the earlier request with which `history` shares most messages.
    `history` extends turn `parent`, which is not the newest turn `newest`, by its messages from `start` on.
    `earlier` is ordered from newest to oldest."""
    same_tools = [
        other
        for other in earlier
        if other.tools_hash == history.tools_hash and other.hashes != history.hashes
    ]
    if not same_tools:
        return f"tools: they or the template's options differ from those of turn {newest}"
    nearest = max(same_tools, key=history.common_length)
    whose = "the last" if nearest is earlier[0] else "an earlier"
    common = history.common_length(nearest)
    if common == len(history.hashes):
        return f"rewound: {common} messages, {whose} request had {len(nearest.hashes)}"
    changed = f"edited: message {common} ({history.messages[common].get('role')})"
    if common < len(nearest.hashes) and nearest is earlier[0]:
        return f"{changed} differs from {whose} request's"
    if parent is not None and all(message["role"] != "assistant" for message in history.messages[start:]):
        return f"older: turn {parent} is continued, the newest is turn {newest}"
    if common < len(nearest.hashes):
        return f"{changed} differs from {whose} request's"
    return f"{changed} is not the recorded reply"

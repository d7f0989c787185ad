"""Lines: the newest requests of a session, so that a request is hashed only from where it is new.

A conversation comes back with every request, longer by a turn. Several may go on side by side in one
session (a main agent and its sub-agents), so several lines are kept; a request continues the one that it
shares most with. Messages that requests share are held once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tidegate.gateway.rendering.messages import chain, root_key, template_form
from tidegate.types import Message

MOST = 32
"""Lines of one session; one more, and the one that was silent longest is hashed anew when it comes back."""


@dataclass(eq=False, slots=True)
class RequestHistory:
    """One request: `keys[i]` is the key of its history up to `messages[i]`."""

    root: bytes
    tools: Any = None
    options: Any = None
    messages: list[Message] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)

    @property
    def asked(self) -> bytes:
        """The key of its whole history."""
        return self.keys[-1] if self.keys else self.root

    def agreement(self, other: RequestHistory) -> int:
        """How many messages both begin with, by meaning."""
        count = 0
        for mine, theirs in zip(self.keys, other.keys, strict=False):
            if mine != theirs:
                break
            count += 1
        return count

    def continue_as(self, start: int, recorded: Sequence[Message]) -> None:
        """Take the keys of `recorded` for the messages from `start` on, which render alike."""
        for index in range(start, len(self.messages)):
            at = index - start
            message = recorded[at] if at < len(recorded) else self.messages[index]
            key = self.keys[index - 1] if index else self.root
            self.keys[index] = chain(key, template_form(message, index))

    def shared(self, messages: Sequence[Message]) -> int:
        """How many messages `messages` begins with as this line does, spelled alike."""
        known = self.messages
        if messages[: len(known)] == known:
            return len(known)
        count = 0
        for mine, other in zip(known, messages, strict=False):
            if mine != other:
                break
            count += 1
        return count


class RequestHistories:
    """The lines of one session, the newest first."""

    def __init__(self) -> None:
        self._lines: list[RequestHistory] = []
        self._empty = RequestHistory(root_key(None, None))

    @property
    def newest(self) -> RequestHistory:
        return self._lines[0] if self._lines else self._empty

    def all(self) -> list[RequestHistory]:
        """The newest first."""
        return list(self._lines)

    def __bool__(self) -> bool:
        return bool(self._lines)

    def keep(self, line: RequestHistory) -> None:
        self._lines.insert(0, line)
        del self._lines[MOST:]

    def drop_newest(self) -> None:
        del self._lines[:1]

    def read(self, messages: Sequence[Message], tools: Any, options: Any) -> RequestHistory:
        """The line of a request. Raises Refusal for messages that cannot be rendered, and is unchanged."""
        newest = self.newest
        same = tools == newest.tools and options == newest.options
        root = newest.root if same else root_key(tools, options)
        before, shared = self._nearest(root, messages)
        keys = before.keys[:shared] if before is not None else []
        key = keys[-1] if keys else root
        for index in range(shared, len(messages)):
            key = chain(key, template_form(messages[index], index))
            keys.append(key)
        held = before.messages[:shared] if before is not None else []
        line = RequestHistory(root, tools, options, [*held, *messages[shared:]], keys)
        if before is not None and shared == len(before.messages):
            self._lines.remove(before)  # it is continued
        self.keep(line)
        return line

    def _nearest(self, root: bytes, messages: Sequence[Message]) -> tuple[RequestHistory | None, int]:
        """The line that a request shares most with, and how many messages that are."""
        best, most = None, 0
        for line in self._lines:
            if line.root != root:
                continue
            shared = line.shared(messages)
            if shared > most or best is None:
                best, most = line, shared
        return best, most

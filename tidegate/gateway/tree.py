"""The turns of one session as a tree: recorded ids, and which of them a new request extends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tidegate.gateway.lines import Line, Lines
from tidegate.gateway.messages import chain, template_form
from tidegate.types import Ids, Message, Turn


class Request(NamedTuple):
    """The request that a turn answers, as far as it is needed to know it again."""

    id: str = ""
    """By which clients know the reply."""
    digest: bytes = b""
    """Of its body."""
    idempotency_key: str | None = None
    ordinal: int = 0
    """How many calls of its session had begun before it."""


class Place(NamedTuple):
    """Where a request belongs: it extends the history of turn `parent` by `messages[start:]`."""

    parent: int | None
    start: int
    asked: bytes
    """Key of the whole history it asks about."""
    why: str | None
    """Why it does not extend the newest turn."""
    root: bytes = b""
    """Key of the tools and template options it came with."""


@dataclass(eq=False, slots=True)
class Node:
    """A turn and the messages it stands for."""

    turn: Turn
    request: Request
    root: bytes
    asked: bytes
    """Key of the history it answers."""
    key: bytes
    """Key of that history with the reply."""
    said: list[Message]
    """What its request adds to the parent's history, as the client wrote it."""
    reply: Message
    length: int
    """Messages of its history, the reply included."""
    in_doubt: bool = False
    """Nobody knows whether its reply went out: the gateway was killed just then."""


class Tree:
    """Matches histories by meaning, and holds each distinct token once."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._by_key: dict[bytes, int] = {}  # key of a history that ends with a reply → the turn
        self._by_asked: dict[bytes, int] = {}  # key of a history that was asked about → the newest turn
        self._lines = Lines()
        self.sampled_tokens = 0
        # The newest turn's whole sequence, so that its follow-up need not gather it.
        self._tip: tuple[int, Ids] | None = None

    def place(self, messages: Sequence[Message], tools: Any, options: Any) -> Place:
        """Find the longest recorded history that `messages` extends, by meaning.

        Raises Refusal for messages that cannot be rendered.
        """
        if self.nodes and not self._lines:
            self._lines.keep(self._last_line())
        before = self._lines.newest
        line = self._lines.read(messages, tools, options)
        for at in range(len(line.keys) - 1, -1, -1):
            index = self._by_key.get(line.keys[at])
            if index is not None and messages[at]["role"] == "assistant":
                return Place(index, at + 1, line.asked, self._why(index, line, before), line.root)
        return Place(None, 0, line.asked, self._why(None, line, before), line.root)

    def _last_line(self) -> Line:
        """The request of the newest turn, in a tree that was restored."""
        node = next((one for one in reversed(self.nodes) if one.key), None)
        if node is None:
            return self._lines.newest
        line = Line(node.root, messages=self.history(node.turn.index)[:-1])
        for index, message in enumerate(line.messages):
            line.keys.append(chain(line.asked, template_form(message, index)))
        return line

    def _why(self, parent: int | None, line: Line, before: Line) -> str | None:
        """Why a request does not extend the newest turn, and which of its messages is the first new one."""
        newest = len(self.nodes) - 1
        if newest < 0 or parent == newest:
            return None
        same = self._by_asked.get(line.asked)
        if same is not None:
            return f"resampled: the messages of turn {same} again"
        if before.root != line.root:
            return f"tools: they or the template's options differ from those of turn {newest}"
        for index, (old, new) in enumerate(zip(before.keys, line.keys, strict=False)):
            if old != new:
                role = line.messages[index].get("role")
                return f"edited: message {index} ({role}) differs from the last request's"
        if len(line.keys) <= len(before.keys):
            return f"rewound: {len(line.keys)} messages, the last request had {len(before.keys)}"
        if parent is not None:
            return f"older: turn {parent} is continued, the newest is turn {newest}"
        index = len(before.keys)
        return f"edited: message {index} ({line.messages[index].get('role')}) is not the recorded reply"

    def prompt(self, parent: int | None, delta: Ids) -> Ids:
        """The whole prompt of a request that adds `delta` to turn `parent`; shape [prompt]."""
        if parent is None:
            return delta
        return np.concatenate((self.sequence(parent), delta))

    def sequence(self, index: int) -> Ids:
        """Prompt and output of a turn; shape [prompt + output]."""
        if self._tip is not None and self._tip[0] == index:
            return self._tip[1]
        pieces = []
        at: int | None = index
        while at is not None:
            turn = self.nodes[at].turn
            pieces += [turn.output_ids, turn.delta_ids]
            at = turn.parent
        return np.concatenate(pieces[::-1])

    def append(
        self,
        turn: Turn,
        prompt: Ids,
        place: Place,
        said: list[Message],
        reply: Message,
        request: Request,
    ) -> Node:
        """Record a turn. `turn.index` and `turn.branch` are set here; `reply` is the OpenAI message."""
        newest = len(self.nodes) - 1
        turn.index = newest + 1
        if turn.branch is None:
            turn.branch = place.why
        if turn.branch is None and newest >= 0 and turn.parent != newest:
            turn.branch = f"parallel: turn {newest} was recorded meanwhile"
        before = 0 if turn.parent is None else self.nodes[turn.parent].length
        key = chain(place.asked, template_form(reply, before + len(said)))
        node = Node(turn, request, place.root, place.asked, key, said, reply, before + len(said) + 1)
        self._keep(node)
        self._tip = (turn.index, np.concatenate((prompt, turn.output_ids)))
        return node

    def delivered(self, index: int) -> None:
        """The client has the reply. Of two turns that read alike it continues the one it saw last."""
        node = self.nodes[index]
        node.turn.delivered, node.in_doubt = True, False
        self._by_key[node.key] = index

    @classmethod
    def restored(cls, nodes: Sequence[Node]) -> Tree:
        """A tree of turns that were recorded before, in their order; sets their `length`."""
        tree = cls()
        for node in nodes:
            parent = node.turn.parent
            node.length = (0 if parent is None else nodes[parent].length) + len(node.said) + 1
            tree._keep(node)
        return tree

    def _keep(self, node: Node) -> None:
        index = len(self.nodes)
        self.nodes.append(node)
        self.sampled_tokens += len(node.turn.output_ids)
        if not node.key:  # stands for a turn that was lost
            return
        self._by_asked[node.asked] = index
        known = self._by_key.get(node.key)
        if known is None or node.turn.delivered or not self.nodes[known].turn.delivered:
            self._by_key[node.key] = index

    def settle(self) -> None:
        """No request comes any more: of turns in doubt only the newest turn was delivered."""
        for index, node in enumerate(self.nodes):
            if node.in_doubt:
                node.in_doubt = False
                if index == len(self.nodes) - 1:
                    self.delivered(index)

    def history(self, index: int) -> list[Message]:
        """A turn's messages from its root on, its reply included."""
        pieces: list[list[Message]] = []
        at: int | None = index
        while at is not None:
            node = self.nodes[at]
            pieces.append([*node.said, node.reply])
            at = node.turn.parent
        return [message for piece in reversed(pieces) for message in piece]

    def turns(self) -> list[Turn]:
        return [node.turn for node in self.nodes]

    def newest(self) -> Node | None:
        """The newest turn that was delivered."""
        return next((node for node in reversed(self.nodes) if node.turn.delivered), None)

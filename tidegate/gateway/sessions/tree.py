"""The turns of one session as a tree: recorded ids, and which of them a new request extends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from tidegate.gateway.parsing.reply import begins_with
from tidegate.gateway.rendering.messages import chain, resemble, template_form
from tidegate.gateway.sessions.branches import branch_reason
from tidegate.gateway.sessions.history import MOST, RequestHistories, RequestHistory
from tidegate.types import CLIENT_CLOSED, Ids, Message, Turn, spans_within

Alike = Callable[[list[Message], list[Message]], bool]
"""Whether the template writes two histories as the same text."""


class TurnRequestInfo(NamedTuple):
    """The request that a turn answers, as far as it is needed to know it again."""

    id: str = ""
    """By which clients know the reply."""
    digest: bytes = b""
    """Of its body."""
    idempotency_key: str | None = None
    ordinal: int = 0
    """How many calls of its session had begun before it."""


class Attachment(NamedTuple):
    """Where a request belongs: it extends the history of turn `parent` by `messages[start:]`."""

    parent: int | None
    start: int
    asked: bytes
    """Key of the whole history it asks about."""
    why: str | None
    """Why it does not extend the newest turn."""
    root: bytes = b""
    """Key of the tools and template options it came with."""
    cut: int | None = None
    """How many of the parent's output ids it quotes, where the client closed that reply and read no more;
    −1 where that is not known yet."""


@dataclass(eq=False, slots=True)
class TurnNode:
    """A turn and the messages it stands for."""

    turn: Turn
    request: TurnRequestInfo
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
    quoted: bool = False
    """A later request had the reply in its history, so the client has it."""


class TurnTree:
    """Matches histories by meaning, and holds each distinct token once."""

    def __init__(self) -> None:
        self.nodes: list[TurnNode] = []
        self._by_key: dict[bytes, int] = {}  # key of a history that ends with a reply → the turn
        self._by_asked: dict[bytes, int] = {}  # key of a history that was asked about → the newest turn
        self._closed: dict[bytes, list[int]] = {}  # the same → turns whose streams were closed
        self._lines = RequestHistories()
        self.sampled_tokens = 0
        # The newest turn's whole sequence, so that its follow-up need not gather it.
        self._tip: tuple[int, Ids] | None = None

    def place(
        self, messages: Sequence[Message], tools: Any, options: Any, alike: Alike = lambda one, other: False
    ) -> Attachment:
        """Find the longest recorded history that `messages` extends: by meaning, or because `alike` says
        that the template writes both histories as the same text.

        Raises Refusal for messages that cannot be rendered.
        """
        if self.nodes and not self._lines:
            self._restore_lines()
        earlier = self._lines.all()
        line = self._lines.read(messages, tools, options)
        parent, start = self._extended(line)
        while self._renders_alike(line, parent, start, alike):
            parent, start = self._extended(line)
        cut = None if parent is None or self.nodes[parent].key == line.keys[start - 1] else -1
        return Attachment(parent, start, line.asked, self._why(line, earlier, parent, start), line.root, cut)

    def _extended(self, line: RequestHistory) -> tuple[int | None, int]:
        """The turn whose history a request extends, and its first message that is new."""
        for at in range(len(line.keys) - 1, -1, -1):
            if line.messages[at]["role"] != "assistant":
                continue
            index = self._by_key.get(line.keys[at])
            if index is None:
                index = self._closed_turn(line.keys[at - 1] if at else line.root, line.messages[at])
            if index is not None:
                return index, at + 1
        return None, 0

    def _renders_alike(self, line: RequestHistory, parent: int | None, start: int, alike: Alike) -> bool:
        """Whether the messages from `start` on begin with a recorded request and its reply, in another form
        of the same text; if so the line takes the recorded keys."""
        sent = line.messages[start:]
        if all(message["role"] != "assistant" for message in sent):
            return False
        before = [] if parent is None else self.history(parent)
        for node in reversed(self.nodes):
            recorded = [*node.said, node.reply]
            rest = sent[len(recorded) :]
            if node.turn.parent != parent or node.root != line.root or not resemble(recorded, sent):
                continue
            if alike([*before, *recorded, *rest], [*before, *sent]):
                line.continue_as(start, recorded)
                return line.keys[start + len(recorded) - 1] == node.key
        return False

    def forget_request(self) -> None:
        """The last request that was placed does not fit the model's context: its messages are not kept."""
        self._lines.drop_newest()

    def _closed_turn(self, asked: bytes, message: Message) -> int | None:
        """The turn that was closed by a client that read the beginning of it as `message`."""
        if not message.get("content") and not message.get("tool_calls"):
            return None
        for index in reversed(self._closed.get(asked, ())):
            node = self.nodes[index]
            if not node.quoted and begins_with(node.reply, message):
                return index
        return None

    def _restore_lines(self) -> None:
        """The newest requests of a tree that was restored."""
        continued = {node.turn.parent for node in self.nodes}
        ends = [node for node in self.nodes if node.key and node.turn.index not in continued]
        for node in ends[-MOST:]:
            line = RequestHistory(node.root, messages=self.history(node.turn.index)[:-1])
            for index, message in enumerate(line.messages):
                line.keys.append(chain(line.asked, template_form(message, index)))
            self._lines.keep(line)

    def _why(
        self, line: RequestHistory, earlier: list[RequestHistory], parent: int | None, start: int
    ) -> str | None:
        """Why a request does not extend the newest turn."""
        newest = len(self.nodes) - 1
        if newest < 0 or parent == newest:
            return None
        same = self._by_asked.get(line.asked)
        if same is not None:
            return f"resampled: the messages of turn {same} again"
        return branch_reason(line, earlier, parent, start, newest)

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
        place: Attachment,
        said: list[Message],
        reply: Message,
        request: TurnRequestInfo,
    ) -> TurnNode:
        """Record a turn. `turn.index` and `turn.branch` are set here; `reply` is the OpenAI message."""
        newest = len(self.nodes) - 1
        turn.index = newest + 1
        if turn.branch is None:
            turn.branch = place.why
        if turn.branch is None and newest >= 0 and turn.parent != newest:
            turn.branch = f"parallel: turn {newest} was recorded meanwhile"
        before = 0 if turn.parent is None else self.nodes[turn.parent].length
        key = chain(place.asked, template_form(reply, before + len(said)))
        node = TurnNode(turn, request, place.root, place.asked, key, said, reply, before + len(said) + 1)
        self._keep(node)
        self._tip = (turn.index, np.concatenate((prompt, turn.output_ids)))
        return node

    def cut(self, index: int, count: int, reply: Message) -> None:
        """Keep the first `count` tokens of a turn whose client read them as `reply`, and no more."""
        node = self.nodes[index]
        turn = node.turn
        self.sampled_tokens -= len(turn.output_ids) - count
        keep_tokens(turn, 0, count)
        turn.finish_reason = CLIENT_CLOSED
        if self._by_key.get(node.key) == index:
            del self._by_key[node.key]
        node.reply = reply
        node.key = chain(node.asked, template_form(reply, node.length - 1))
        self._index(node)
        if self._tip is not None and self._tip[0] == index:
            self._tip = None

    def split(self, index: int, count: int, reply: Message) -> list[TurnNode]:
        """End a turn where a request quotes it; what was delivered after that becomes a turn that follows it.
        Returns the turns that changed."""
        turn = self.nodes[index].turn
        rest = replace(turn, index=len(self.nodes), parent=index, delta_ids=turn.delta_ids[:0], reward=0.0)
        self.cut(index, count, reply)
        keep_tokens(rest, count, len(rest.output_ids))
        if not len(rest.output_ids):
            return [self.nodes[index]]
        rest.branch = f"unquoted: it was delivered after turn {index}, and the next request does not quote it"
        said: Message = {"role": "assistant", "content": ""}
        self._keep(TurnNode(rest, TurnRequestInfo(), b"", b"", b"", [], said, self.nodes[index].length + 1))
        return [self.nodes[index], self.nodes[-1]]

    def delivered(self, index: int) -> None:
        """The client has the reply. Of two turns that read alike it continues the one it saw last."""
        node = self.nodes[index]
        node.turn.delivered, node.in_doubt = True, False
        self._by_key[node.key] = index

    @classmethod
    def restored(cls, nodes: Sequence[TurnNode]) -> TurnTree:
        """A tree of turns that were recorded before, in their order; sets their `length`."""
        tree = cls()
        for node in nodes:
            parent = node.turn.parent
            node.length = (0 if parent is None else nodes[parent].length) + len(node.said) + 1
            if parent is not None:
                nodes[parent].quoted = True
            tree._keep(node)
        return tree

    def _keep(self, node: TurnNode) -> None:
        self.nodes.append(node)
        self.sampled_tokens += len(node.turn.output_ids)
        self._index(node)

    def _index(self, node: TurnNode) -> None:
        index = node.turn.index
        if not node.key:  # a turn that was lost, or one that no request can quote
            return
        self._by_asked[node.asked] = index
        if node.turn.finish_reason == CLIENT_CLOSED:
            closed = self._closed.setdefault(node.asked, [])
            if index not in closed:
                closed.append(index)
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

    def replies(self) -> int:
        """How many replies were recorded; the rest of one that was split is none of its own."""
        return sum(bool(node.key) for node in self.nodes)

    def turns(self) -> list[Turn]:
        return [node.turn for node in self.nodes]

    def newest(self) -> TurnNode | None:
        """The newest turn that was delivered, an exempt one only where there is no other."""
        delivered = [node for node in reversed(self.nodes) if node.turn.delivered]
        return next((node for node in delivered if node.turn.trainable), next(iter(delivered), None))


def keep_tokens(turn: Turn, first: int, end: int) -> None:
    """Keep a turn's sampled tokens `first..end` alone."""
    turn.output_ids, turn.logprobs = turn.output_ids[first:end], turn.logprobs[first:end]
    turn.version_spans = tuple(spans_within(turn.version_spans, first, end))
    if turn.output_mask is not None:
        turn.output_mask = turn.output_mask[first:end]


def prefix_mismatch(prompt: Ids, parent: Turn, added: int) -> bool:
    """Whether `prompt`, without the `added` ids at its end, does not end as turn `parent` did.

    `parent` was itself looked at when its prompt was made, so all of its history need not be: what it
    added and what was sampled is enough, and costs the same at turn 2 and at turn 1,000.
    """
    end = len(prompt) - added
    middle = end - len(parent.output_ids)
    start = middle - len(parent.delta_ids)
    if start < 0 or (parent.parent is None and start > 0):
        return True
    recorded = parent.delta_ids.tobytes() + parent.output_ids.tobytes()  # all are int32
    return prompt[start:end].tobytes() != recorded

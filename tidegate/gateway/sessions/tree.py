"""Stores the turns of one session as a tree and finds the turn that a new request extends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from tidegate.gateway.rendering.messages import begins_with, chain, resemble, template_form
from tidegate.gateway.sessions.history import MAX_HISTORIES, RequestHistories, RequestHistory, branch_reason
from tidegate.turn import CLIENT_CLOSED, Ids, Turn, spans_within
from tidegate.types import Message

Alike = Callable[[list[Message], list[Message]], bool]
"""Returns whether the template renders two histories to the same text."""


class TurnRequestInfo(NamedTuple):
    """The request that a turn answers: the fields that identify a retry."""

    id: str = ""
    """Reply id sent to the client."""
    digest: bytes = b""
    """Hash of the request's body."""
    idempotency_key: str | None = None
    ordinal: int = 0
    """Number of calls that the session had started before it."""


class Attachment(NamedTuple):
    """Position of a request in the tree: it extends the history of turn `parent` by `messages[start:]`."""

    parent: int | None
    start: int
    history_hash: bytes
    """Hash of the request's complete history."""
    branch_reason: str | None
    """Reason that the request does not extend the newest turn; None if it does."""
    tools_hash: bytes = b""
    """Hash of the request's tools and template options, and of its policy if this has a name."""
    quoted_ids: int | None = None
    """Number of the parent's output ids that the request quotes, if the client closed that reply's stream;
    −1 while the number is unknown."""


@dataclass(eq=False, slots=True)
class TurnNode:
    """A turn and its messages."""

    turn: Turn
    request: TurnRequestInfo
    tools_hash: bytes
    history_hash: bytes
    """Hash of the request's complete history."""
    reply_hash: bytes
    """Hash of that history with the reply; empty for a turn that no request can quote."""
    new_messages: list[Message]
    """Messages that the request adds to the parent's history, as sent by the client."""
    reply: Message
    length: int
    """Number of messages in its history, including the reply."""
    _: KW_ONLY
    delivery_unknown: bool = False
    """The gateway was killed before it recorded whether the reply was sent."""
    quoted: bool = False
    """A later request has the reply in its history, so the client received it."""


class TurnTree:
    """Matches histories by meaning and stores each distinct token once."""

    def __init__(self) -> None:
        self.nodes: list[TurnNode] = []
        self._by_reply_hash: dict[bytes, int] = {}  # hash of a history ending in a reply → turn
        self._by_history_hash: dict[bytes, int] = {}  # hash of a request's history → newest turn
        self._closed: dict[bytes, list[int]] = {}  # hash of a request's history → turns closed by clients
        self._histories = RequestHistories()
        self.sampled_tokens = 0
        # Index and complete sequence of the newest turn, so that its follow-up need not gather it.
        self._tip: tuple[int, Ids] | None = None

    def attach(
        self,
        messages: Sequence[Message],
        tools: Any,
        options: Any,
        render_alike: Alike = lambda recorded, sent: False,
        record: bool = True,
        policy: str = "",
    ) -> Attachment:
        """Finds the longest recorded history of a policy that `messages` extends, by meaning or by rendered
        text. With `record`, later requests are compared with this one, to give the reason of a branch. Raises
        ApiError for messages that cannot be rendered."""
        if self.nodes and not self._histories:
            self._restore_histories()
        earlier = self._histories.all()
        history = self._histories.add_request(messages, tools, options, policy)
        parent, start = self._extended_turn(history)
        while self._renders_alike(history, parent, start, render_alike):
            parent, start = self._extended_turn(history)
        if not record:
            self._histories.restore(earlier)
        complete = parent is None or self.nodes[parent].reply_hash == history.hashes[start - 1]
        return Attachment(
            parent,
            start,
            history.history_hash,
            self._branch_reason(history, earlier, parent, start),
            history.tools_hash,
            None if complete else -1,
        )

    def _extended_turn(self, history: RequestHistory) -> tuple[int | None, int]:
        """Returns the turn whose history a request extends, and the index of its first new message."""
        for at in range(len(history.hashes) - 1, -1, -1):
            if history.messages[at]["role"] != "assistant":
                continue
            index = self._by_reply_hash.get(history.hashes[at])
            if index is None:
                index = self._find_closed_turn(
                    history.hashes[at - 1] if at else history.tools_hash, history.messages[at]
                )
            else:
                index = self._repeated_exactly(index, history.messages[at])
            if index is not None:
                return index, at + 1
        return None, 0

    def _repeated_exactly(self, index: int, message: Message) -> int:
        """Returns the turn whose reply `message` repeats to the digit, of those that mean the same as turn
        `index`: an integer and its rounded form, which some clients send, mean the same."""
        reply_hash = self.nodes[index].reply_hash
        alike = [node for node in reversed(self.nodes) if node.reply_hash == reply_hash]
        # Only the arguments of tool calls can hold such numbers.
        if len(alike) < 2 or not message.get("tool_calls"):
            return index
        calls = template_form(message, 0)["tool_calls"]
        same = [node.turn.index for node in alike if _same_arguments(node.reply, calls)]
        return index if index in same or not same else same[0]

    def _renders_alike(
        self, history: RequestHistory, parent: int | None, start: int, render_alike: Alike
    ) -> bool:
        """Returns whether the messages from `start` on render like a recorded request and its reply. If so,
        `history` adopts the recorded hashes."""
        sent = history.messages[start:]
        if all(message["role"] != "assistant" for message in sent):
            return False
        before = [] if parent is None else self.history(parent)
        for node in reversed(self.nodes):
            recorded = [*node.new_messages, node.reply]
            rest = sent[len(recorded) :]
            if (
                node.turn.parent != parent
                or node.tools_hash != history.tools_hash
                or not resemble(recorded, sent)
            ):
                continue
            if render_alike([*before, *recorded, *rest], [*before, *sent]):
                history.adopt_recorded(start, recorded)
                return history.hashes[start + len(recorded) - 1] == node.reply_hash
        return False

    def forget_request(self) -> None:
        """Discards the last attached request, which does not fit the model's context."""
        self._histories.drop_newest()

    def _find_closed_turn(self, history_hash: bytes, message: Message) -> int | None:
        """Returns the turn whose stream the client closed after reading `message`."""
        if not message.get("content") and not message.get("tool_calls"):
            return None
        for index in reversed(self._closed.get(history_hash, ())):
            node = self.nodes[index]
            if not node.quoted and begins_with(node.reply, message):
                return index
        return None

    def _restore_histories(self) -> None:
        """Rebuilds the newest request histories of a restored tree."""
        continued = {node.turn.parent for node in self.nodes}
        ends = [node for node in self.nodes if node.reply_hash and node.turn.index not in continued]
        for node in ends[-MAX_HISTORIES:]:
            messages = self.history(node.turn.index)[:-1]
            history = RequestHistory(node.tools_hash, messages=messages, policy=node.turn.policy)
            for index, message in enumerate(history.messages):
                history.hashes.append(chain(history.history_hash, template_form(message, index)))
            self._histories.add(history)

    def _branch_reason(
        self, history: RequestHistory, earlier: list[RequestHistory], parent: int | None, start: int
    ) -> str | None:
        newest = self.newest_of(history.policy)
        if newest is None or parent == newest:
            return self.changes_policy(history.policy)
        same = self._by_history_hash.get(history.history_hash)
        if same is not None:
            return f"resampled: the messages of turn {same} again"
        earlier = [one for one in earlier if one.policy == history.policy]
        return branch_reason(history, earlier, parent, start, newest)

    def newest_of(self, policy: str) -> int | None:
        """Returns the index of the newest turn of a policy; None if it has none."""
        own = (node.turn.index for node in reversed(self.nodes) if node.turn.policy == policy)
        return next(own, None)

    def changes_policy(self, policy: str) -> str | None:
        """Returns the reason that the newest turn of a policy is continued, or its first one begun, though
        another policy sampled the newest turn of all; None if the same one did."""
        newest = self.nodes[-1].turn if self.nodes else None
        if newest is None or newest.policy == policy:
            return None
        return f"policy: turn {newest.index}, the newest, is of policy {newest.policy!r}"

    def prompt(self, parent: int | None, delta: Ids) -> Ids:
        """Returns the prompt of a request that adds `delta` to turn `parent`; shape [prompt]."""
        if parent is None:
            return delta
        return np.concatenate((self.sequence(parent), delta))

    def sequence(self, index: int) -> Ids:
        """Returns a turn's prompt and output ids; shape [prompt + output]."""
        if self._tip is not None and self._tip[0] == index:
            return self._tip[1]
        turns = [node.turn for node in self._path(index)]
        return np.concatenate([ids for turn in turns for ids in (turn.delta_ids, turn.output_ids)])

    def append(
        self,
        turn: Turn,
        prompt: Ids,
        attachment: Attachment,
        new_messages: list[Message],
        reply: Message,
        request: TurnRequestInfo,
    ) -> TurnNode:
        """Records a turn and sets its `index` and `branch`; `reply` is the OpenAI message."""
        newest = len(self.nodes) - 1
        turn.index = newest + 1
        turn.branch = attachment.branch_reason
        if turn.branch is None and newest >= 0 and turn.parent != newest:
            turn.branch = f"parallel: turn {newest} was recorded meanwhile"
        before = 0 if turn.parent is None else self.nodes[turn.parent].length
        length = before + len(new_messages) + 1
        tools_hash, history_hash = attachment.tools_hash, attachment.history_hash
        reply_hash = chain(history_hash, template_form(reply, length - 1))
        node = TurnNode(turn, request, tools_hash, history_hash, reply_hash, new_messages, reply, length)
        self._add(node)
        self._tip = (turn.index, np.concatenate((prompt, turn.output_ids)))
        return node

    def truncate(self, index: int, count: int, reply: Message) -> None:
        """Truncates a turn to its first `count` output ids, which the client read as `reply`."""
        node = self.nodes[index]
        turn = node.turn
        self.sampled_tokens -= len(turn.output_ids) - count
        keep_tokens(turn, 0, count)
        turn.finish_reason = CLIENT_CLOSED
        if self._by_reply_hash.get(node.reply_hash) == index:
            del self._by_reply_hash[node.reply_hash]
        node.reply = reply
        node.reply_hash = chain(node.history_hash, template_form(reply, node.length - 1))
        self._index(node)
        if self._tip is not None and self._tip[0] == index:
            # The cached sequence contains the ids that were cut off.
            self._tip = None

    def split(self, index: int, count: int, reply: Message) -> list[TurnNode]:
        """Truncates a turn at the end of the text that a request quotes; the remaining output ids become a
        child turn. Returns the changed turns."""
        turn = self.nodes[index].turn
        shown_s = turn.seconds * count / max(1, len(turn.output_ids))
        # Before the truncation, which changes `turn`; its reward and its seconds must not count twice.
        rest = replace(
            turn, index=len(self.nodes), reward=0.0,
            started=turn.started + shown_s, seconds=turn.seconds - shown_s,
        )  # fmt: skip
        self.truncate(index, count, reply)
        turn.seconds = shown_s
        keep_tokens(rest, count, len(rest.output_ids))
        rest.parent, rest.delta_ids = index, rest.delta_ids[:0]
        if not len(rest.output_ids):
            return [self.nodes[index]]
        rest.branch = f"unquoted: it was delivered after turn {index}, and the next request does not quote it"
        empty: Message = {"role": "assistant", "content": ""}
        self._add(TurnNode(rest, TurnRequestInfo(), b"", b"", b"", [], empty, self.nodes[index].length + 1))
        return [self.nodes[index], self.nodes[-1]]

    def mark_delivered(self, index: int) -> None:
        """Marks a reply as received. Of turns with equal histories the last delivered one is continued."""
        node = self.nodes[index]
        node.turn.delivered, node.delivery_unknown = True, False
        self._by_reply_hash[node.reply_hash] = index

    @classmethod
    def restored(cls, nodes: Sequence[TurnNode], *, closed: bool = False) -> TurnTree:
        """Builds a tree from recorded turns in their order and sets their `length`. The tree of a `closed`
        session has no indexes, as no request extends it."""
        tree = cls()
        for node in nodes:
            parent = node.turn.parent
            node.length = (0 if parent is None else nodes[parent].length) + len(node.new_messages) + 1
            if parent is not None:
                nodes[parent].quoted = True
            tree._add(node, index=not closed)
        return tree

    def _add(self, node: TurnNode, *, index: bool = True) -> None:
        self.nodes.append(node)
        self.sampled_tokens += len(node.turn.output_ids)
        if index:
            self._index(node)

    def _index(self, node: TurnNode) -> None:
        index = node.turn.index
        if not node.reply_hash:
            return
        self._by_history_hash[node.history_hash] = index
        if node.turn.finish_reason == CLIENT_CLOSED:
            closed = self._closed.setdefault(node.history_hash, [])
            if index not in closed:
                closed.append(index)
        earlier = self._by_reply_hash.get(node.reply_hash)
        if earlier is None or node.turn.delivered or not self.nodes[earlier].turn.delivered:
            self._by_reply_hash[node.reply_hash] = index

    def resolve_deliveries(self) -> None:
        """Called when no more requests are accepted: of the turns whose delivery is unknown, only the newest
        turn counts as delivered."""
        for index, node in enumerate(self.nodes):
            if node.delivery_unknown:
                node.delivery_unknown = False
                if index == len(self.nodes) - 1:
                    self.mark_delivered(index)

    def history(self, index: int) -> list[Message]:
        """Returns a turn's messages from its root on, including its reply."""
        return [message for node in self._path(index) for message in (*node.new_messages, node.reply)]

    def _path(self, index: int) -> list[TurnNode]:
        path: list[TurnNode] = []
        at: int | None = index
        while at is not None:
            path.append(self.nodes[at])
            at = path[-1].turn.parent
        return path[::-1]

    def replies(self) -> int:
        """Returns the number of recorded replies; the second part of a split reply does not count."""
        return sum(bool(node.reply_hash) for node in self.nodes)

    def turns(self) -> list[Turn]:
        return [node.turn for node in self.nodes]

    def newest(self) -> TurnNode | None:
        """Returns the newest delivered turn; an exempt one only if every delivered turn is exempt."""
        delivered = [node for node in reversed(self.nodes) if node.turn.delivered]
        return next((node for node in delivered if node.turn.trainable), next(iter(delivered), None))


def _same_arguments(reply: Message, calls: Sequence[Any]) -> bool:
    own = template_form(reply, 0).get("tool_calls", ())
    return [call["function"] for call in own] == [call["function"] for call in calls]


def keep_tokens(turn: Turn, first: int, end: int) -> None:
    if turn.experts is not None:
        width = len(turn.experts) // max(1, turn.routed_tokens)
        own = turn.routed_tokens - len(turn.output_ids)  # those that follow tokens of the prompt come first
        turn.experts = turn.experts[(own + first if first else 0) * width : (own + end) * width]
    if turn.top_ids is not None and turn.top_logprobs is not None:
        listed = slice(first * turn.top_k, end * turn.top_k)
        turn.top_ids, turn.top_logprobs = turn.top_ids[listed], turn.top_logprobs[listed]
    if turn.kept_ids is not None and turn.kept_counts is not None:
        kept = slice(int(turn.kept_counts[:first].sum()), int(turn.kept_counts[:end].sum()))
        turn.kept_ids, turn.kept_counts = turn.kept_ids[kept], turn.kept_counts[first:end]
    turn.output_ids, turn.logprobs = turn.output_ids[first:end], turn.logprobs[first:end]
    turn.version_spans = tuple(spans_within(turn.version_spans, first, end))
    if turn.output_mask is not None:
        turn.output_mask = turn.output_mask[first:end]


def prefix_mismatch(prompt: Ids, parent: Turn, added: int) -> bool:
    """Returns whether `prompt` without its last `added` ids ends differently from turn `parent`. The parent's
    own prompt was checked when it was built, so comparing the parent's added and sampled ids suffices, at a
    cost independent of the number of turns."""
    end = len(prompt) - added
    middle = end - len(parent.output_ids)
    start = middle - len(parent.delta_ids)
    if start < 0 or (parent.parent is None and start > 0):
        return True
    recorded = parent.delta_ids.tobytes() + parent.output_ids.tobytes()  # all are int32
    return prompt[start:end].tobytes() != recorded

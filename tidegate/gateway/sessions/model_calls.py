"""Tracks calls: the request, to which every dialect is translated, and its reply's generation and delivery.

A generation runs in its own task, so that an SDK's retry can join it. It is cancelled, and aborted on the
engine, when its last listener disconnects.
"""

from __future__ import annotations

import asyncio
import bisect
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from tidegate.gateway.engines.protocol import GenerateRequest, GenerateResult, trainable_tokens
from tidegate.gateway.engines.reply_lists import TopRow
from tidegate.gateway.errors import ApiError
from tidegate.gateway.ids import unique_name
from tidegate.gateway.parsing.reply import ReplyReader, ToolUse
from tidegate.gateway.rendering.messages import begins_with
from tidegate.gateway.sampling import RequestedSampling
from tidegate.gateway.sessions.tree import Attachment, TurnNode
from tidegate.turn import CLIENT_CLOSED, Ids, PackedIds, PackedLogprobs, Turn
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


@dataclass(eq=False, slots=True)
class ModelCall:
    """A request for one reply, until its turn is recorded and delivered."""

    request: TurnRequest
    attachment: Attachment
    delta: Ids
    new_messages: list[Message]
    engine_request: GenerateRequest
    reader: ReplyReader
    _: KW_ONLY
    structured: str | None = None
    ordinal: int = 0
    """Number of calls that the session had started before it."""
    id: str = field(default_factory=unique_name)
    created: int = field(default_factory=lambda: int(time.time()))
    started: float = field(default_factory=time.time)
    clock: float = field(default_factory=time.perf_counter)
    """The same, on a monotonic clock."""
    prompt_tokens: int = 0
    task: asyncio.Task[None] | None = None
    node: TurnNode | None = None
    refusal: ApiError | None = None
    new_reader: Callable[[], ReplyReader] | None = None
    """Creates a reader of this reply from its beginning."""
    delivered_parts: int = 0
    """Number of the reader's parts that were sent to a connected client."""
    listeners: set[asyncio.Event] = field(default_factory=set)
    """Events of the responses that wait for it: set when parts arrive and when the call is done."""

    @property
    def done(self) -> bool:
        return self.node is not None or self.refusal is not None

    @property
    def seconds(self) -> float:
        """Seconds since it started, on a monotonic clock."""
        return time.perf_counter() - self.clock

    @property
    def recorded(self) -> TurnNode:
        """The turn of a call that is done and was not refused."""
        assert self.node is not None, "the call is done"
        return self.node

    def on_ids(self, ids: list[int]) -> None:
        """Passes on all ids so far, as an engine's stream reports them."""
        fresh = ids[self.reader.seen :]
        if fresh:
            self.reader.push(fresh)
            self.notify()

    def notify(self) -> None:
        for listener in self.listeners:
            listener.set()

    def delivered_ids(self, ids: Sequence[int]) -> int:
        """Discards the parts that were not sent; returns the number of ids of the sent ones."""
        reader = self.reader
        reader.truncate(self.delivered_parts)
        last = max(reader.part_ends, default=0)
        if self.new_reader is None or not last:
            return last
        first = max((end for end in reader.part_ends if end < last), default=0)
        return count_read_ids(self.new_reader, ids[:last], reader.message(), first) or last

    def quoted_by(self, request: TurnRequest) -> bool:
        """Returns whether a request quotes the beginning of this reply, which is still streaming."""
        if request.prompt is not None:
            before = (
                self.engine_request.prompt.tolist()
                if isinstance(request.prompt, list)
                else self.new_messages[-1]["content"]
            )
            return request.prompt[: len(before)] == before and len(request.prompt) > len(before)
        at = self.attachment.start + len(self.new_messages)
        if len(request.messages) <= at or request.messages[at - 1] != self.new_messages[-1]:
            return False
        message = request.messages[at]
        if not isinstance(message, dict) or message.get("role") != "assistant":
            return False
        return begins_with(self.reader.message(), message)

    def turn(self, result: GenerateResult) -> Turn:
        top_ids, top_logprobs = _packed(result.top)
        kept = result.kept if self.engine_request.sampling_mask else None
        turn = Turn(
            index=-1,
            parent=self.attachment.parent,
            delta_ids=self.delta,
            output_ids=np.asarray(result.ids, dtype=np.int32),
            logprobs=np.asarray(result.logprobs, dtype=np.float32),
            version_spans=tuple(result.spans),
            finish_reason=result.finish,
            temperature=float(self.engine_request.params["temperature"]),
            delivered=False,
            kv_version=result.kv_version,
            cached_tokens=result.cached_tokens,
            started=self.started,
            seconds=self.seconds,
            parse=self.reader.status,
            exempt=self.request.exempt,
            structured=self.structured,
            output_mask=trainable_tokens(result) if self.structured == "grammar" else None,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            kept_ids=np.concatenate(kept) if kept else None,
            kept_counts=np.array([len(ids) for ids in kept], dtype=np.int32) if kept else None,
            policy=self.request.policy,
        )
        if result.experts is not None:
            turn.experts = result.experts[: turn.routed_tokens].reshape(-1)
        return turn


def count_read_ids(
    reader: Callable[[], ReplyReader], ids: Sequence[int], message: Message, first: int = 0
) -> int | None:
    """Number of a reply's ids, at least `first`, that a client has read whose copy of the reply is `message`.
    None if the reply does not begin with `message`. `reader` creates a reader for the reply."""

    def reach(count: int) -> bool:
        fresh = reader()
        fresh.push(ids[:count])
        fresh.finish()
        return begins_with(fresh.message(), message)

    if not reach(len(ids)):
        return None
    return first + bisect.bisect_left(range(first, len(ids)), True, key=reach)


def _packed(top: Sequence[TopRow]) -> tuple[PackedIds | None, PackedLogprobs | None]:
    """The likeliest ids of all tokens and their logprobs, as many for each token."""
    if not top:
        return None, None
    width = min(len(ids) for ids, _ in top)
    ids, logprobs = (np.concatenate([row[:width] for row in rows]) for rows in zip(*top, strict=True))
    return ids, logprobs.astype(np.float16)


class SessionModelCalls:
    """The calls of one session that are running or may be retried."""

    def __init__(self) -> None:
        self.started_calls = 0
        self.running: set[ModelCall] = set()
        self._by_idempotency_key: dict[str, ModelCall | TurnNode] = {}
        self._undelivered: list[ModelCall] = []
        self._recorded: list[TurnNode] = []
        self._delivered: dict[bytes, TurnNode] = {}
        """Newest delivered turn of each digest; a retry shows that its reply was lost in transit."""
        self._abandoned: Counter[bytes] = Counter()

    def add(self, call: ModelCall) -> None:
        self.started_calls += 1
        self.running.add(call)
        self._undelivered.append(call)
        if call.request.idempotency_key is not None:
            self._by_idempotency_key[call.request.idempotency_key] = call

    def add_recorded(self, node: TurnNode) -> None:
        """Adds a recorded turn that has no call, after a restart or a failed write, for retries to find."""
        self.started_calls = max(self.started_calls, node.request.ordinal + 1)
        if node.turn.delivered:
            self._delivered[node.request.digest] = node
        elif node not in self._recorded and node.turn.finish_reason != CLIENT_CLOSED:
            self._recorded.append(node)
        if node.request.idempotency_key is not None:
            self._by_idempotency_key[node.request.idempotency_key] = node

    def find_repeated(self, request: TurnRequest) -> ModelCall | TurnNode | None:
        """Returns the call or the recorded turn that a request repeats, or None for a new request. Raises
        ApiError if an idempotency key is reused with another body."""
        key, digest = request.idempotency_key, request.digest
        earlier = None if key is None else self._by_idempotency_key.get(key)
        if earlier is not None:
            pending = earlier if isinstance(earlier, ModelCall) else None
            if earlier.request.digest != digest:
                raise ApiError(
                    "Idempotency-Key: it was sent with another body before; use a new key",
                    param="Idempotency-Key",
                )
            given_up = pending is not None and (pending.refusal or pending.engine_request.closed)
            return None if given_up else earlier
        if not request.retry:
            return None
        repeated = [call for call in self._undelivered if call.request.digest == digest]
        without_listener = next((call for call in repeated if not call.listeners), None)
        if without_listener is None and self._abandoned[digest] > 0:
            self._abandoned[digest] -= 1  # the retry repeats an abandoned call, which has no reply
            return None
        # Otherwise it is running for a client whose disconnect was not noticed yet.
        return without_listener or next(iter(repeated), None) or self._find_recorded(digest, key)

    def _find_recorded(self, digest: bytes, idempotency_key: str | None) -> TurnNode | None:
        """Returns the recorded turn whose reply a retry missed; None if the client has the reply."""
        self._recorded = [node for node in self._recorded if not node.turn.delivered]
        if node := next((node for node in self._recorded if node.request.digest == digest), None):
            return node
        node = self._delivered.get(digest)
        if node is None or node.quoted or node.request.idempotency_key != idempotency_key:
            return None
        return node

    def on_done(self, call: ModelCall) -> None:
        """Handles the end of a generation; failed and abandoned calls cannot be retried."""
        self.running.discard(call)
        call.engine_request.prompt = np.empty(0, np.int32)  # a retry needs only the reply
        if call.node is None:
            self.forget(call)

    def on_abandoned(self, call: ModelCall) -> None:
        """Handles a call whose last listener disconnected before the reply."""
        self._abandoned[call.request.digest] += 1
        self.forget(call)

    def on_delivered(self, call: ModelCall) -> None:
        """Replaces a delivered call by its recorded turn, which a retry may still get."""
        self.forget(call)
        node = call.recorded
        self._delivered[node.request.digest] = node
        if node.request.idempotency_key is not None:
            self._by_idempotency_key[node.request.idempotency_key] = node

    def on_superseded(self, node: TurnNode) -> None:
        """Handles the retry of a partly delivered reply: the turn is not returned again."""
        self._delivered.pop(node.request.digest, None)
        if node.request.idempotency_key is not None:
            self._by_idempotency_key.pop(node.request.idempotency_key, None)

    def forget(self, call: ModelCall) -> None:
        """Lets no retry join a call, for instance as its client disconnected after a part of the reply."""
        if call in self._undelivered:
            self._undelivered.remove(call)

    def cancel_all(self, error: ApiError) -> None:
        """Cancels every running generation; listeners get `error`."""
        for call in list(self.running):
            call.refusal = call.refusal or error
            if call.task is not None:
                call.task.cancel()

"""A call: one request for a reply, its generation, and whether the reply reached the client.

The generation runs in a task of its own, so that an SDK's retry can join it. It is cancelled, and
aborted on the engine, as soon as nobody listens.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tidegate.gateway.engines.protocol import GenerateRequest, GenerateResult, trainable_tokens
from tidegate.gateway.errors import ApiError
from tidegate.gateway.ids import unique_name
from tidegate.gateway.parsing.reply import ReplyReader, begins_with, read_through
from tidegate.gateway.request import TurnRequest
from tidegate.gateway.sessions.tree import Attachment, TurnNode, TurnRequestInfo
from tidegate.types import CLIENT_CLOSED, Ids, Message, Turn


@dataclass(eq=False, slots=True)
class PendingTurn:
    """One request on its way to becoming a turn."""

    digest: bytes
    place: Attachment
    delta: Ids
    said: list[Message]
    order: GenerateRequest
    reader: ReplyReader
    branch: str | None = None
    exempt: str | None = None
    structured: str | None = None
    idempotency_key: str | None = None
    ordinal: int = 0
    """How many calls of its session had begun before it."""
    id: str = field(default_factory=unique_name)
    created: int = field(default_factory=lambda: int(time.time()))
    started: float = field(default_factory=time.time)
    prompt_tokens: int = 0
    task: asyncio.Task[None] | None = None
    node: TurnNode | None = None
    refusal: ApiError | None = None
    cached_tokens: int = 0
    reread: Callable[[], ReplyReader] | None = None
    """Makes a reader of this reply from its beginning."""
    given: int = 0
    """How many of the reader's parts were sent to a client that was there."""
    bells: set[asyncio.Event] = field(default_factory=set)
    """Of those who listen: set when there are more parts, or when the call is done."""

    @property
    def done(self) -> bool:
        return self.node is not None or self.refusal is not None

    def on_ids(self, ids: list[int]) -> None:
        """All ids so far, as a stream brings them."""
        fresh = ids[self.reader.seen :]
        if fresh:
            self.reader.push(fresh)
            self.wake()

    def wake(self) -> None:
        for bell in self.bells:
            bell.set()

    def delivered_ids(self, ids: Sequence[int]) -> int:
        """Forget the parts that were not sent; returns how many ids the others are made of."""
        reader = self.reader
        reader.keep(self.given)
        last = max(reader.ends, default=0)
        if self.reread is None or not last:
            return last
        first = max((end for end in reader.ends if end < last), default=0)
        return read_through(self.reread, ids[:last], reader.message(), first) or last

    def quoted_by(self, ask: TurnRequest) -> bool:
        """Whether a request has the beginning of this reply in its history, while it is still streamed."""
        if ask.prompt is not None:
            before = self.order.prompt.tolist() if isinstance(ask.prompt, list) else self.said[-1]["content"]
            return ask.prompt[: len(before)] == before and len(ask.prompt) > len(before)
        at = self.place.start + len(self.said)
        if len(ask.messages) <= at or ask.messages[at - 1] != self.said[-1]:
            return False
        message = ask.messages[at]
        if not isinstance(message, dict) or message.get("role") != "assistant":
            return False
        return begins_with(self.reader.message(), message)

    @property
    def request(self) -> TurnRequestInfo:
        return TurnRequestInfo(self.id, self.digest, self.idempotency_key, self.ordinal)

    def turn(self, sampled: GenerateResult) -> Turn:
        """The turn that the sampled tokens make; undelivered as yet."""
        return Turn(
            index=-1,
            parent=self.place.parent,
            delta_ids=self.delta,
            output_ids=np.asarray(sampled.ids, dtype=np.int32),
            logprobs=np.asarray(sampled.logprobs, dtype=np.float32),
            version_spans=tuple(sampled.spans),
            finish_reason=sampled.finish,
            temperature=float(self.order.params["temperature"]),
            delivered=False,
            kv_version=sampled.kv_version,
            cached_tokens=sampled.cached_tokens,
            branch=self.branch,
            started=self.started,
            seconds=time.time() - self.started,
            parse=self.reader.status,
            exempt=self.exempt,
            structured=self.structured,
            output_mask=trainable_tokens(sampled) if self.structured == "grammar" else None,
        )


class PendingTurns:
    """The calls of one session that are under way or may be asked for again."""

    def __init__(self) -> None:
        self.begun = 0
        self.live: set[PendingTurn] = set()
        self._by_key: dict[str, PendingTurn | TurnNode] = {}
        self._undelivered: list[PendingTurn] = []
        self._recorded: list[TurnNode] = []
        self._delivered: dict[bytes, TurnNode] = {}
        """The newest delivered turn of each digest: a retry shows that its reply was lost on the way."""
        self._abandoned: Counter[bytes] = Counter()

    def add(self, call: PendingTurn) -> None:
        self.begun += 1
        self.live.add(call)
        self._undelivered.append(call)
        if call.idempotency_key is not None:
            self._by_key[call.idempotency_key] = call

    def remember(self, node: TurnNode) -> None:
        """A turn without a call, recorded by a gateway that was killed, or kept back: it may be asked for."""
        self.begun = max(self.begun, node.request.ordinal + 1)
        if node.turn.delivered:
            self._delivered[node.request.digest] = node
        elif node not in self._recorded and node.turn.finish_reason != CLIENT_CLOSED:
            self._recorded.append(node)
        if node.request.idempotency_key is not None:
            self._by_key[node.request.idempotency_key] = node

    def retried(
        self, digest: bytes, idempotency_key: str | None, retry: bool
    ) -> PendingTurn | TurnNode | None:
        """The call, or the recorded turn, that this request repeats, if it repeats one.

        Raises Refusal where an idempotency key comes back with another body.
        """
        if idempotency_key is not None and (known := self._by_key.get(idempotency_key)) is not None:
            if (known.digest if isinstance(known, PendingTurn) else known.request.digest) != digest:
                raise ApiError("this Idempotency-Key came with another body before", param="Idempotency-Key")
            if isinstance(known, PendingTurn) and (known.refusal is not None or known.order.closed):
                return None
            return known
        if not retry:
            return None
        alike = [one for one in self._undelivered if one.digest == digest]
        unheard = next((one for one in alike if not one.bells), None)
        if unheard is None and self._abandoned[digest] > 0:
            self._abandoned[digest] -= 1  # that one is what is retried; it has no reply to give
            return None
        # Else it is under way for a client whose going was not noticed yet.
        return unheard or next(iter(alike), None) or self._recalled(digest, idempotency_key)

    def _recalled(self, digest: bytes, idempotency_key: str | None) -> TurnNode | None:
        """The recorded turn whose reply the retry did not get; None where its client has the reply."""
        self._recorded = [node for node in self._recorded if not node.turn.delivered]
        if kept := next((node for node in self._recorded if node.request.digest == digest), None):
            return kept
        node = self._delivered.get(digest)
        if node is None or node.quoted or node.request.idempotency_key != idempotency_key:
            return None
        return node

    def settle(self, call: PendingTurn) -> None:
        """Its generation ended. What failed or was abandoned cannot be asked for again."""
        self.live.discard(call)
        call.order.prompt = call.order.prompt[:0].copy()  # what is kept for a retry is the reply
        if call.node is None:
            self._forget(call)

    def abandoned(self, call: PendingTurn) -> None:
        """Its last listener left before there was a reply."""
        self._abandoned[call.digest] += 1
        self._forget(call)

    def delivered(self, call: PendingTurn) -> None:
        """A retry, or its Idempotency-Key again, still gets this turn, for which the record is enough."""
        self._forget(call)
        assert call.node is not None, "only a recorded turn is delivered"
        self._delivered[call.digest] = call.node
        if call.idempotency_key is not None:
            self._by_key[call.idempotency_key] = call.node

    def closed(self, call: PendingTurn) -> None:
        """Its last listener left with a part of the reply."""
        self._forget(call)

    def superseded(self, node: TurnNode) -> None:
        """Its client asked again, and did not get what was delivered of it."""
        self._delivered.pop(node.request.digest, None)
        if node.request.idempotency_key is not None:
            self._by_key.pop(node.request.idempotency_key, None)

    def _forget(self, call: PendingTurn) -> None:
        if call in self._undelivered:
            self._undelivered.remove(call)

    def cancel(self, why: ApiError) -> None:
        """End every generation under way; who listens is told why."""
        for call in list(self.live):
            call.refusal = call.refusal or why
            if call.task is not None:
                call.task.cancel()

"""A call: one request for a reply, its generation, and whether the reply reached the client.

The generation runs in a task of its own, so that an SDK's retry can join it. It is cancelled, and
aborted on the engine, as soon as nobody listens.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from tidegate.gateway.names import unique_name
from tidegate.gateway.protocol import Order, Sampled
from tidegate.gateway.refusal import Refusal
from tidegate.gateway.reply import ReplyReader
from tidegate.gateway.tree import Node, Place, Request
from tidegate.types import Ids, Message, Turn


@dataclass(eq=False, slots=True)
class Call:
    """One request on its way to becoming a turn."""

    digest: bytes
    place: Place
    delta: Ids
    said: list[Message]
    order: Order
    reader: ReplyReader
    branch: str | None = None
    idempotency_key: str | None = None
    ordinal: int = 0
    """How many calls of its session had begun before it."""
    id: str = field(default_factory=unique_name)
    created: int = field(default_factory=lambda: int(time.time()))
    started: float = field(default_factory=time.time)
    prompt_tokens: int = 0
    task: asyncio.Task[None] | None = None
    node: Node | None = None
    refusal: Refusal | None = None
    cached_tokens: int = 0
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

    @property
    def request(self) -> Request:
        return Request(self.id, self.digest, self.idempotency_key, self.ordinal)

    def turn(self, sampled: Sampled) -> Turn:
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
        )


class Calls:
    """The calls of one session that are under way or may be asked for again."""

    def __init__(self) -> None:
        self.begun = 0
        self.live: set[Call] = set()
        self._by_key: dict[str, Call | Node] = {}
        self._undelivered: list[Call] = []
        self._recorded: list[Node] = []
        self._abandoned: Counter[bytes] = Counter()

    def add(self, call: Call) -> None:
        self.begun += 1
        self.live.add(call)
        self._undelivered.append(call)
        if call.idempotency_key is not None:
            self._by_key[call.idempotency_key] = call

    def remember(self, node: Node) -> None:
        """A turn without a call, recorded by a gateway that was killed, or kept back: it may be asked for."""
        self.begun = max(self.begun, node.request.ordinal + 1)
        if not node.turn.delivered and node not in self._recorded:
            self._recorded.append(node)
        if node.request.idempotency_key is not None:
            self._by_key[node.request.idempotency_key] = node

    def retried(self, digest: bytes, idempotency_key: str | None, retry: bool) -> Call | Node | None:
        """The call, or the recorded turn, that this request repeats, if it repeats one.

        Raises Refusal where an idempotency key comes back with another body.
        """
        if idempotency_key is not None and (known := self._by_key.get(idempotency_key)) is not None:
            if (known.digest if isinstance(known, Call) else known.request.digest) != digest:
                raise Refusal("this Idempotency-Key came with another body before", param="Idempotency-Key")
            return known if isinstance(known, Node) or known.refusal is None else None
        if not retry:
            return None
        alike = [one for one in self._undelivered if one.digest == digest]
        unheard = next((one for one in alike if not one.bells), None)
        if unheard is None and self._abandoned[digest] > 0:
            self._abandoned[digest] -= 1  # that one is what is retried; it has no reply to give
            return None
        # Else it is under way for a client whose going was not noticed yet.
        return unheard or next(iter(alike), None) or self._recalled(digest)

    def _recalled(self, digest: bytes) -> Node | None:
        self._recorded = [node for node in self._recorded if not node.turn.delivered]
        return next((node for node in self._recorded if node.request.digest == digest), None)

    def settle(self, call: Call) -> None:
        """Its generation ended. What failed or was abandoned cannot be asked for again."""
        self.live.discard(call)
        call.order.prompt = call.order.prompt[:0].copy()  # what is kept for a retry is the reply
        if call.node is None:
            self._forget(call)

    def abandoned(self, call: Call) -> None:
        """Its last listener left before there was a reply."""
        self._abandoned[call.digest] += 1
        self._forget(call)

    def delivered(self, call: Call) -> None:
        """A repeated idempotency key still gets this turn, for which the record of it is enough."""
        self._forget(call)
        if call.idempotency_key is not None and call.node is not None:
            self._by_key[call.idempotency_key] = call.node

    def _forget(self, call: Call) -> None:
        if call in self._undelivered:
            self._undelivered.remove(call)

    def cancel(self, why: Refusal) -> None:
        """End every generation under way; who listens is told why."""
        for call in list(self.live):
            call.refusal = call.refusal or why
            if call.task is not None:
                call.task.cancel()

"""Assigns calls to engines and queues them when every engine is at capacity.

A session stays on one engine while that engine is healthy, because its cache holds the session's prefix. If
that engine is at capacity and another has a free slot, the call goes there: a prefill is cheaper than a wait.
Otherwise the call waits in a bounded queue that is fair between sessions, and between project keys, whose
conversations and episodes count as one. Calls that arrived while no engine
was in rotation wait for any engine, ahead of later calls that wait for a particular one.

Each engine serves the calls of one policy, or of several that share it. The calls of other policies wait for
other engines.

Engines with a candidate version serve the sessions that are to sample from it, and no others. Without such
engines these sessions are served by the others.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from tidegate.errors import EngineError
from tidegate.gateway.engines.engine import Affinity, EngineEndpoint
from tidegate.gateway.engines.fair_queue import FairQueue, QueueTicket, Tickets

SLACK = 0.25
"""Fraction above the mean load at which a member takes no more keys."""


class QueueFullError(EngineError):
    """The queue is full; nothing was sampled for the refused call."""


class _Part(NamedTuple):
    """The engines that may serve a call."""

    policy: str
    candidate: bool


@dataclass(eq=False, slots=True)
class _Waiter:
    affinity: Affinity
    ticket: QueueTicket
    slot: asyncio.Future[EngineEndpoint]


class Dispatcher:
    """Assigns engine slots to calls. No slot is free while a call waits."""

    def __init__(self, max_waiting: int) -> None:
        self.engines: dict[str, EngineEndpoint] = {}
        self.waiting = 0
        self._max_waiting = max_waiting
        self._tickets = Tickets()
        self._queues: dict[EngineEndpoint, FairQueue[_Waiter]] = {}
        """Waiting calls by preferred engine."""
        self._unassigned: defaultdict[_Part, FairQueue[_Waiter]] = defaultdict(FairQueue)
        """Calls that found no engine in rotation, by the engines for which they wait."""

    def add(self, engine: EngineEndpoint) -> None:
        self.engines[engine.url] = engine
        self._queues[engine] = FairQueue()

    def remove(self, url: str) -> EngineEndpoint | None:
        """Takes an engine out of rotation; its running calls continue. None if it is unknown."""
        engine = self.engines.pop(url, None)
        if engine is not None:
            # Running calls hold the endpoint: their release must not dispatch to it.
            engine.healthy = False
            self.requeue(engine)
            del self._queues[engine]
        return engine

    def assign(self, affinity: Affinity) -> EngineEndpoint | None:
        """Return the engine of a session, assigning one if needed; None if no engine is in rotation."""
        if affinity.engine is not None and self._suits(affinity.engine, affinity):
            return affinity.engine
        part = self._part(affinity)
        loads = {
            url: engine.assigned_sessions
            for url, engine in self.engines.items()
            if engine.serves and _part_of(engine) == part
        }
        if not loads:
            return None
        engine = self.engines[place(affinity.key, loads)]
        affinity.assign(engine)
        return engine

    async def acquire(self, affinity: Affinity, *, fresh: bool = True) -> EngineEndpoint:
        """Wait for a slot on an engine; the caller gives it back with `release`. Raises QueueFullError if the
        queue is full and the call is `fresh`, unless fewer calls of its flow wait than the flow's equal
        share; a call that was admitted before is never refused."""
        assigned = self.assign(affinity)
        free = assigned is not None and assigned.has_free_slot
        engine = assigned if free else self._least_busy(self._part(affinity))
        if engine is not None:
            engine.busy += 1
            return engine
        full = self.waiting >= self._max_waiting and not self._tickets.has_room(
            affinity.flow, self._max_waiting
        )
        if fresh and full:
            raise QueueFullError(f"the engine queue is full ({self.waiting} calls wait); retry later")
        ticket = self._tickets.draw(affinity.flow)
        waiter = _Waiter(affinity, ticket, asyncio.get_running_loop().create_future())
        self._enqueue(assigned, waiter)
        try:
            return await waiter.slot
        except asyncio.CancelledError:
            if waiter.slot.done() and not waiter.slot.cancelled():
                self.release(waiter.slot.result())  # the slot was assigned before the cancellation
            else:
                self._withdraw(waiter)
            raise

    def release(self, engine: EngineEndpoint) -> None:
        engine.busy -= 1
        self.dispatch_waiting(engine)

    def dispatch_waiting(self, engine: EngineEndpoint) -> None:
        """Assign an engine's free slots to waiting calls: first calls of its own sessions and of sessions
        without an engine, then any that it may serve; the lowest ticket first."""
        while engine.has_free_slot and (queues := self._waiting_for(engine)):
            waiter = min(queues, key=lambda queue: queue.first).pop()
            self.waiting -= 1
            self._tickets.served(waiter.affinity.flow, waiter.ticket)
            if waiter.slot.done():
                continue  # cancelled, but its task has not run since
            # A session whose engine is only busy stays assigned to it, where its prefix is cached.
            if waiter.affinity.engine is None or not self._suits(waiter.affinity.engine, waiter.affinity):
                waiter.affinity.assign(engine)
            engine.busy += 1
            waiter.slot.set_result(engine)

    def requeue(self, engine: EngineEndpoint) -> None:
        """Move the calls that wait for an engine out of rotation to other queues."""
        for waiter in self._queues[engine].drain():
            self.waiting -= 1
            self._enqueue(self.assign(waiter.affinity), waiter)

    def regroup(self, candidates: Collection[str]) -> None:
        """Set which engines have the candidate version, and move the waiting calls accordingly."""
        for url, engine in self.engines.items():
            engine.candidate = url in candidates
        waiters = [waiter for queue in self._all_queues() for waiter in queue.drain()]
        self.waiting -= len(waiters)
        for waiter in waiters:
            self._enqueue(self.assign(waiter.affinity), waiter)
        for engine in self.engines.values():
            self.dispatch_waiting(engine)

    def _all_queues(self) -> list[FairQueue[_Waiter]]:
        return [*self._queues.values(), *self._unassigned.values()]

    def _part(self, affinity: Affinity) -> _Part:
        """Return the engines to which the session's calls go: those of their policy, with the candidate
        version or without it."""
        engines = self.engines.values()
        takes = affinity.candidate and any(
            engine.candidate and engine.policy == affinity.policy for engine in engines
        )
        return _Part(affinity.policy, takes)

    def _suits(self, engine: EngineEndpoint, affinity: Affinity) -> bool:
        """Whether an engine may serve the session's calls."""
        return engine.serves and _part_of(engine) == self._part(affinity)

    def _waiting_for(self, engine: EngineEndpoint) -> list[FairQueue[_Waiter]]:
        """Return the queues from which the engine takes its next call; none if no call waits for it."""
        if not self.waiting:
            return []
        part = _part_of(engine)
        own = [queue for queue in (self._queues.get(engine), self._unassigned.get(part)) if queue]
        return own or [queue for other, queue in self._queues.items() if queue and _part_of(other) == part]

    def _least_busy(self, part: _Part) -> EngineEndpoint | None:
        engines = self.engines.values()
        free = [engine for engine in engines if engine.has_free_slot and _part_of(engine) == part]
        return min(free, key=lambda engine: engine.busy / engine.limit, default=None)

    def _enqueue(self, engine: EngineEndpoint | None, waiter: _Waiter) -> None:
        waiter.affinity.disruptions += engine is None
        queue = self._unassigned[self._part(waiter.affinity)] if engine is None else self._queues[engine]
        queue.push(waiter.ticket, waiter)
        self.waiting += 1

    def _withdraw(self, waiter: _Waiter) -> None:
        for queue in self._all_queues():
            if queue.discard(waiter.ticket):
                self.waiting -= 1
                self._tickets.withdraw(waiter.affinity.flow)
                return


def _part_of(engine: EngineEndpoint) -> _Part:
    return _Part(engine.policy, engine.candidate)


def rank(key: str, members: Iterable[str]) -> list[str]:
    """Returns the members by descending score for a key, a hash of key and member (rendezvous hashing, Thaler
    and Ravishankar, 1998): adding or removing a member moves only its own keys."""

    def score(member: str) -> bytes:
        return blake2b(f"{member}\0{key}".encode("utf-8", "replace"), digest_size=8).digest()

    return sorted(members, key=score, reverse=True)


def place(key: str, loads: Mapping[str, float]) -> str:
    """Returns the highest-ranked member below the load limit; `loads` gives the current load of each member.
    The limit is the mean rounded up, or SLACK above the mean if that is more, so some member is below it
    (Mirrokni, Thorup and Zadimoghaddam, 2018). Raises ValueError if there is no member."""
    if not loads:
        raise ValueError("cannot place a key: there are no members")
    total = sum(loads.values()) + 1
    limit = max(-(-total // len(loads)), int(total * (1 + SLACK) / len(loads)))
    return next(member for member in rank(key, loads) if loads[member] + 1 <= limit)

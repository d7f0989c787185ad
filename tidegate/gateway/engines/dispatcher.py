"""Which engine a call goes to, and who waits for whom.

A session keeps its seat while the engine is well: it has the session's prefix in its cache. A call that
would wait there goes to another engine that has a slot free: a prefill is cheaper than a wait. Where none
is free, calls wait in a fair line by session, and the line is bounded. Calls that came while no engine served
wait for any engine, and go before those that came later and wait for one of them.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from tidegate.errors import EngineError
from tidegate.gateway.engines.engine import Affinity, EngineEndpoint
from tidegate.gateway.engines.fair_queue import FairQueue, QueueTicket, Tickets
from tidegate.gateway.engines.hashing import place


class QueueFullError(EngineError):
    """So many calls wait already that one more is not taken in; nothing of it was sampled."""


@dataclass(eq=False, slots=True)
class _Waiter:
    seat: Affinity
    ticket: QueueTicket
    slot: asyncio.Future[EngineEndpoint]


class Dispatcher:
    """Hands out the slots of engines. While anyone waits, no slot is free."""

    def __init__(self, most_waiting: int) -> None:
        self.engines: dict[str, EngineEndpoint] = {}
        self.waiting = 0
        self._most_waiting = most_waiting
        self._tickets = Tickets()
        self._lines: dict[EngineEndpoint | None, FairQueue[_Waiter]] = {None: FairQueue()}
        """By the engine whose cache they want; None: there was no engine."""

    def add(self, engine: EngineEndpoint) -> None:
        self.engines[engine.url] = engine
        self._lines[engine] = FairQueue()

    def remove(self, url: str) -> EngineEndpoint | None:
        """It gets no new calls; those under way go on."""
        engine = self.engines.pop(url, None)
        if engine is not None:
            engine.healthy = False
            self.down(engine)
            del self._lines[engine]
        return engine

    def seat(self, seat: Affinity) -> EngineEndpoint | None:
        """The engine where a session sits; None where no engine is well."""
        if seat.engine is not None and seat.engine.serves:
            return seat.engine
        serving = {url: one for url, one in self.engines.items() if one.serves}
        if not serving:
            return None
        engine = serving[place(seat.key, {url: one.seats for url, one in serving.items()})]
        seat.take(engine)
        return engine

    async def enter(self, seat: Affinity, *, fresh: bool = True) -> EngineEndpoint:
        """A slot on an engine, to be given back by `leave`; waits until there is one.

        Raises QueueFullError where the line is full and the call is `fresh`: one that was let in before
        is never turned away.
        """
        own = self.seat(seat)
        engine = own if own is not None and own.free else self._freest()
        if engine is not None:
            engine.busy += 1
            return engine
        if fresh and self.waiting >= self._most_waiting:
            raise QueueFullError(f"{self.waiting} calls wait for an engine; no more are taken in")
        ticket = self._tickets.draw(seat.flow)
        waiter = _Waiter(seat, ticket, asyncio.get_running_loop().create_future())
        self._wait(own, waiter)
        try:
            return await waiter.slot
        except asyncio.CancelledError:
            if waiter.slot.done() and not waiter.slot.cancelled():
                self.leave(waiter.slot.result())  # it was given a slot as it gave up
            else:
                self._give_up(waiter)
            raise

    def leave(self, engine: EngineEndpoint) -> None:
        engine.busy -= 1
        self.serve(engine)

    def serve(self, engine: EngineEndpoint) -> None:
        """Give an engine's free slots to those who wait: first its own sessions and those that have no
        engine, then any; the one that came first among them."""
        while engine.free and self.waiting:
            own = [line for line in (self._lines.get(engine), self._lines[None]) if line]
            line = min(own or filter(None, self._lines.values()), key=lambda line: line.first)
            waiter = line.pop()
            self.waiting -= 1
            self._tickets.served(waiter.seat.flow, waiter.ticket)
            if waiter.slot.done():
                continue  # it was cancelled, and has not run since
            if waiter.seat.engine is None or not waiter.seat.engine.serves:
                waiter.seat.take(engine)
            engine.busy += 1
            waiter.slot.set_result(engine)

    def down(self, engine: EngineEndpoint) -> None:
        """It does not serve any more: who waited for it waits for another one."""
        for waiter in self._lines[engine].drain():
            self.waiting -= 1
            self._wait(self.seat(waiter.seat), waiter)

    def _freest(self) -> EngineEndpoint | None:
        free = [one for one in self.engines.values() if one.free]
        return min(free, key=lambda one: one.busy / one.limit, default=None)

    def _wait(self, engine: EngineEndpoint | None, waiter: _Waiter) -> None:
        waiter.seat.disturbances += engine is None
        self._lines[engine].push(waiter.ticket, waiter)
        self.waiting += 1

    def _give_up(self, waiter: _Waiter) -> None:
        for line in self._lines.values():
            if line.discard(waiter.ticket):
                self.waiting -= 1
                self._tickets.given_up(waiter.seat.flow)
                return

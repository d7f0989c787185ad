"""Simulated engines: continuous batching as processor sharing.

An engine with b running requests samples a token for each of them every `iteration_s + b · request_s`.
All requests share one progress counter, so adding or removing a request costs O(log b), not O(b).
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

from tidegate.simulation.scenario import EngineModel

_FEW = 8


class Clock:
    """Simulated seconds: runs events in order of time, then of scheduling."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (self.now + seconds, self._number, event))

    def step(self) -> bool:
        """Runs the next event; returns False if there is none."""
        if not self._events:
            return False
        self.now, _, event = heapq.heappop(self._events)
        event()
        return True


@dataclass(eq=False, slots=True)
class SimulatedRequest:
    """One reply. `done` is called when its last token has been sampled."""

    prompt: float
    tokens: float
    done: Callable[[], None]
    begun: Callable[[], None]
    """Called before its first token is sampled."""
    _: KW_ONLY
    engine: SimulatedEngine | None = None
    target: float = 0.0
    """Progress of the engine at which the request is done."""
    running: bool = False
    gone: bool = False
    sampled: float = 0.0
    """Tokens sampled before it was cancelled."""


@dataclass(eq=False, slots=True)
class SimulatedEngine:
    """One engine. A publish calls `pause` and `resume`; `up` is False after a failure."""

    clock: Clock
    model: EngineModel
    up: bool = True
    paused: bool = False
    running: int = 0
    queue: deque[SimulatedRequest] = field(default_factory=deque)
    busy_s: float = 0.0
    _progress: float = 0.0
    _: KW_ONLY
    _debt: float = 0.0
    _at: float = 0.0
    _heap: list[tuple[float, int, SimulatedRequest]] = field(default_factory=list)
    _number: int = 0
    _stamp: int = 0

    @property
    def load(self) -> int:
        return self.running + len(self.queue)

    @property
    def rate(self) -> float:
        """Tokens per second while no prompt is read."""
        return self.running / self._iteration() if self.up else 0.0

    def add(self, request: SimulatedRequest) -> None:
        request.engine = self
        self._advance()
        self.queue.append(request)
        self._fill()
        self._schedule()

    def cancel(self, request: SimulatedRequest) -> None:
        self._advance()
        request.gone = True
        if request.running:
            self._leave(request)
            request.sampled = max(0.0, request.tokens - (request.target - self._progress))
        else:
            self.queue.remove(request)
        self._schedule()

    def pause(self) -> None:
        self._advance()
        self.paused = True
        self._schedule()

    def resume(self) -> None:
        self._advance()
        self.paused = False
        self._fill()
        self._schedule()

    def fail(self) -> list[SimulatedRequest]:
        """Fails the engine; returns its requests with their remaining tokens, for other engines."""
        self._advance()
        self.up = False
        left = [request for _, _, request in self._heap if not request.gone]
        for request in left:
            request.tokens = max(1.0, request.target - self._progress)
        requests = left + list(self.queue)
        self._heap.clear()
        self.queue.clear()
        self.running, self._debt = 0, 0.0
        self._stamp += 1
        return requests

    def recover(self) -> None:
        """Brings the engine back, and starts requests that were queued while no engine was up."""
        self._advance()
        self.up = True
        self._fill()
        self._schedule()

    def _iteration(self) -> float:
        return self.model.iteration_s + self.running * self.model.request_s

    def _advance(self) -> None:
        """Updates progress to the current time: prompts first, then tokens in the remaining time."""
        passed, self._at = self.clock.now - self._at, self.clock.now
        if self.paused or not self.running or not self.up:
            return
        self.busy_s += passed
        read = min(self._debt, passed)
        self._debt -= read
        self._progress += (passed - read) / self._iteration()

    def _fill(self) -> None:
        while self.queue and self.up and not self.paused and self.running < self.model.slots:
            self._admit(self.queue.popleft())

    def _admit(self, request: SimulatedRequest) -> None:
        self.running += 1
        self._debt += request.prompt * self.model.prompt_token_s
        request.running = True
        request.target = self._progress + request.tokens
        self._number += 1
        heapq.heappush(self._heap, (request.target, self._number, request))
        request.begun()

    def _leave(self, request: SimulatedRequest) -> None:
        request.running = False
        self.running -= 1
        self._fill()

    def _schedule(self) -> None:
        """Schedules the end of the next reply, and invalidates what was scheduled before."""
        self._stamp += 1
        while self._heap and self._heap[0][2].gone:
            heapq.heappop(self._heap)
        if self.paused or not self._heap or not self.up:
            return
        wait = self._debt + max(0.0, self._heap[0][0] - self._progress) * self._iteration()
        stamp = self._stamp
        self.clock.after(wait, lambda: self._end(stamp))

    def _end(self, stamp: int) -> None:
        if stamp != self._stamp:
            return
        self._advance()
        request = heapq.heappop(self._heap)[2]
        self._progress = max(self._progress, request.target)  # corrects rounding
        request.gone = True
        self._leave(request)
        self._schedule()
        request.done()


@dataclass(slots=True)
class Pool:
    """All engines. A session is assigned to the least loaded of a few engines."""

    clock: Clock
    model: EngineModel
    rng: random.Random
    engines: list[SimulatedEngine] = field(default_factory=list)
    lost: int = 0

    def __post_init__(self) -> None:
        self.engines = [SimulatedEngine(self.clock, self.model) for _ in range(self.model.count)]
        if self.model.failures_per_hour > 0:
            for engine in self.engines:
                self._schedule_failure(engine)

    def assign(self) -> SimulatedEngine:
        """Returns the least loaded engine; among many engines, the less loaded of two random ones."""
        choice = self.engines if len(self.engines) <= _FEW else self.rng.sample(self.engines, 2)
        up = [engine for engine in choice if engine.up] or [engine for engine in self.engines if engine.up]
        return min(up or self.engines, key=lambda engine: engine.load)

    def pause(self) -> None:
        for engine in self.engines:
            engine.pause()

    def resume(self) -> None:
        for engine in self.engines:
            engine.resume()

    def busy_s(self) -> float:
        return sum(engine.busy_s for engine in self.engines)

    def _schedule_failure(self, engine: SimulatedEngine) -> None:
        self.clock.after(
            self.rng.expovariate(self.model.failures_per_hour / 3600), lambda: self._lose(engine)
        )

    def _lose(self, engine: SimulatedEngine) -> None:
        self.lost += 1
        for request in engine.fail():
            request.running = False
            self.assign().add(request)
        self.clock.after(self.model.recover_s, lambda: self._recover(engine))

    def _recover(self, engine: SimulatedEngine) -> None:
        engine.recover()
        self._schedule_failure(engine)

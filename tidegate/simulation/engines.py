"""Simulated engines: continuous batching as processor sharing.

An engine with b running requests gives each of them a token every `iteration_s + b · request_s`. Its
requests' progress is one common number, so an arrival or a departure costs O(log b), not O(b).
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tidegate.simulation.clock import Clock
from tidegate.simulation.scenario import EngineModel

_FEW = 8


@dataclass(eq=False, slots=True)
class SimulatedRequest:
    """One reply on its way. `done` is called when its last token is there."""

    prompt: float
    tokens: float
    done: Callable[[], None]
    begun: Callable[[], None]
    """Called when its first token is about to be sampled."""
    engine: SimulatedEngine | None = None
    target: float = 0.0
    """The engine's progress at which it is done."""
    running: bool = False
    gone: bool = False
    sampled: float = 0.0
    """Of it, where it was cancelled or moved."""


@dataclass(eq=False, slots=True)
class SimulatedEngine:
    """One engine; `pause` and `resume` bracket a publish, `up` is False while it is lost."""

    clock: Clock
    model: EngineModel
    up: bool = True
    paused: bool = False
    running: int = 0
    queue: deque[SimulatedRequest] = field(default_factory=deque)
    busy_s: float = 0.0
    _progress: float = 0.0
    _debt: float = 0.0
    _at: float = 0.0
    _heap: list[tuple[float, int, SimulatedRequest]] = field(default_factory=list)
    _number: int = 0
    _stamp: int = 0

    @property
    def load(self) -> int:
        return self.running + len(self.queue)

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

    def lose(self) -> list[SimulatedRequest]:
        """It died: its requests, with what is left of them, are somebody else's now."""
        self._advance()
        self.up = False
        left = [one for _, _, one in self._heap if not one.gone]
        for request in left:
            request.tokens = max(1.0, request.target - self._progress)
        orphans = left + list(self.queue)
        self._heap.clear()
        self.queue.clear()
        self.running, self._debt = 0, 0.0
        self._stamp += 1
        return orphans

    def revive(self) -> None:
        """It is back; what queued here while no engine at all was up begins."""
        self._advance()
        self.up = True
        self._fill()
        self._schedule()

    def _iteration(self) -> float:
        return self.model.iteration_s + self.running * self.model.request_s

    def _advance(self) -> None:
        """Bring progress up to now: prompts first, tokens with what time is left."""
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
        """Have the next reply's end happen; what was scheduled before is void."""
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
        self._progress = max(self._progress, request.target)  # what rounding left out
        request.gone = True
        self._leave(request)
        self._schedule()
        request.done()


@dataclass(slots=True)
class Pool:
    """All engines. A new session sits on the least loaded of a few, and stays there."""

    clock: Clock
    model: EngineModel
    rng: random.Random
    engines: list[SimulatedEngine] = field(default_factory=list)
    lost: int = 0

    def __post_init__(self) -> None:
        self.engines = [SimulatedEngine(self.clock, self.model) for _ in range(self.model.count)]
        if self.model.failures_per_hour > 0:
            for engine in self.engines:
                self._doom(engine)

    def seat(self) -> SimulatedEngine:
        """The least loaded engine; among many, the better one of two (as good, and cheap to find)."""
        choice = self.engines if len(self.engines) <= _FEW else self.rng.sample(self.engines, 2)
        up = [one for one in choice if one.up] or [one for one in self.engines if one.up]
        return min(up or self.engines, key=lambda one: one.load)

    def pause(self) -> None:
        for engine in self.engines:
            engine.pause()

    def resume(self) -> None:
        for engine in self.engines:
            engine.resume()

    def busy_s(self) -> float:
        return sum(engine.busy_s for engine in self.engines)

    def _doom(self, engine: SimulatedEngine) -> None:
        self.clock.after(
            self.rng.expovariate(self.model.failures_per_hour / 3600), lambda: self._lose(engine)
        )

    def _lose(self, engine: SimulatedEngine) -> None:
        self.lost += 1
        for request in engine.lose():
            request.running = False
            self.seat().add(request)
        self.clock.after(self.model.recover_s, lambda: self._back(engine))

    def _back(self, engine: SimulatedEngine) -> None:
        engine.revive()
        self._doom(engine)

"""Simulated clock: runs events in order of time, then of scheduling."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Clock:
    """Seconds since the start of the simulation."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def after(self, seconds: float, happen: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (self.now + seconds, self._number, happen))

    def step(self) -> bool:
        """Let the next event happen; False where there is none."""
        if not self._events:
            return False
        self.now, _, happen = heapq.heappop(self._events)
        happen()
        return True

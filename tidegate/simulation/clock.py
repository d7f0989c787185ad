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

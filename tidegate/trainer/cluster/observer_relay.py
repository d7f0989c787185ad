"""Buffers the events of a run on a cluster until the command that started it fetches them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from tidegate.observer import Observer

MAX_EVENTS = 10_000

Event = tuple[str, tuple[object, ...]]
"""A method of `Observer`, and its arguments."""


class ObserverRelay:
    """Observer that buffers events; beyond the limit, the oldest are dropped."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)

    def take_events(self) -> list[Event]:
        """Return and clear the buffered events."""
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def started(self, info: Mapping[str, object]) -> None:
        self._events.append(("started", (dict(info),)))

    def note(self, text: str) -> None:
        self._events.append(("note", (text,)))

    def progress(self, what: str, done: int, total: int) -> None:
        self._events.append(("progress", (what, done, total)))

    def state(self, snapshot: Mapping[str, float]) -> None:
        self._events.append(("state", (dict(snapshot),)))

    def step(self, metrics: Mapping[str, float]) -> None:
        self._events.append(("step", (dict(metrics),)))

    def finished(self, result: Mapping[str, object]) -> None:
        self._events.append(("finished", (dict(result),)))

    def close(self) -> None:
        self._events.append(("close", ()))


def replay(event: Event, observer: Observer) -> None:
    """Apply an event to an observer."""
    method, arguments = event
    getattr(observer, method)(*arguments)

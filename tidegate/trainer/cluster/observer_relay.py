"""What a run on a cluster tells, kept until the command that started it has heard it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from tidegate.observer import Observer

KEPT = 10_000

Told = tuple[str, tuple[object, ...]]
"""A method of `Observer`, and its arguments."""


class ObserverRelay:
    """An observer whose news are asked for. Where nobody asks, the oldest are forgotten."""

    def __init__(self) -> None:
        self._told: deque[Told] = deque(maxlen=KEPT)

    def news(self) -> list[Told]:
        """What was told since the last time."""
        found = []
        while self._told:
            found.append(self._told.popleft())
        return found

    def started(self, info: Mapping[str, object]) -> None:
        self._told.append(("started", (dict(info),)))

    def note(self, text: str) -> None:
        self._told.append(("note", (text,)))

    def progress(self, what: str, done: int, total: int) -> None:
        self._told.append(("progress", (what, done, total)))

    def state(self, snapshot: Mapping[str, float]) -> None:
        self._told.append(("state", (dict(snapshot),)))

    def step(self, metrics: Mapping[str, float]) -> None:
        self._told.append(("step", (dict(metrics),)))

    def finished(self, result: Mapping[str, object]) -> None:
        self._told.append(("finished", (dict(result),)))

    def close(self) -> None:
        self._told.append(("close", ()))


def tell(told: Told, observer: Observer) -> None:
    """Have an observer hear what another one was told."""
    method, arguments = told
    getattr(observer, method)(*arguments)

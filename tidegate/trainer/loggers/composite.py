"""Combines several observers into one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tidegate.observer import Observer


class CompositeObserver:
    """Forwards every call to each observer, in order; closes them in reverse order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.observers = observers

    def _each(self, method: str, *arguments: object) -> None:
        for observer in self.observers:
            getattr(observer, method)(*arguments)

    def started(self, info: Mapping[str, object]) -> None:
        self._each("started", info)

    def note(self, text: str) -> None:
        self._each("note", text)

    def progress(self, what: str, done: int, total: int) -> None:
        self._each("progress", what, done, total)

    def state(self, snapshot: Mapping[str, float]) -> None:
        self._each("state", snapshot)

    def step(self, metrics: Mapping[str, float]) -> None:
        self._each("step", metrics)

    def finished(self, result: Mapping[str, object]) -> None:
        self._each("finished", result)

    def close(self) -> None:
        for observer in reversed(self.observers):
            observer.close()

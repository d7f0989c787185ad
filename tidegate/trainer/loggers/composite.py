"""Combines several observers into one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tidegate.observer import Observer


class CompositeObserver:
    """Forwards every call to each observer, in order; closes them in reverse order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.observers = observers

    def started(self, info: Mapping[str, object]) -> None:
        for observer in self.observers:
            observer.started(info)

    def note(self, text: str) -> None:
        for observer in self.observers:
            observer.note(text)

    def progress(self, what: str, done: int, total: int) -> None:
        for observer in self.observers:
            observer.progress(what, done, total)

    def state(self, snapshot: Mapping[str, float]) -> None:
        for observer in self.observers:
            observer.state(snapshot)

    def step(self, metrics: Mapping[str, float]) -> None:
        for observer in self.observers:
            observer.step(metrics)

    def finished(self, result: Mapping[str, object]) -> None:
        for observer in self.observers:
            observer.finished(result)

    def close(self) -> None:
        for observer in reversed(self.observers):
            observer.close()

"""Several observers as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tidegate.observer import Observer


class CompositeObserver:
    """Tells each of them everything, in order; they are closed in reverse, so that the first hears it all."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.observers = observers

    def started(self, info: Mapping[str, object]) -> None:
        for one in self.observers:
            one.started(info)

    def note(self, text: str) -> None:
        for one in self.observers:
            one.note(text)

    def progress(self, what: str, done: int, total: int) -> None:
        for one in self.observers:
            one.progress(what, done, total)

    def state(self, snapshot: Mapping[str, float]) -> None:
        for one in self.observers:
            one.state(snapshot)

    def step(self, metrics: Mapping[str, float]) -> None:
        for one in self.observers:
            one.step(metrics)

    def finished(self, result: Mapping[str, object]) -> None:
        for one in self.observers:
            one.finished(result)

    def close(self) -> None:
        for one in reversed(self.observers):
            one.close()

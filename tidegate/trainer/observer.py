"""Who watches a run. Observing never changes what is observed: the loop only tells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Observer(Protocol):
    """What the loop tells; the live view is one, a test's recorder another."""

    def started(self, info: dict[str, object]) -> None: ...
    def note(self, text: str) -> None: ...
    def progress(self, what: str, done: int, total: int) -> None: ...
    def state(self, snapshot: dict[str, float]) -> None: ...
    def step(self, metrics: dict[str, float]) -> None: ...
    def finished(self, result: dict[str, object]) -> None: ...
    def close(self) -> None: ...


class Silent:
    """Watches and says nothing."""

    def started(self, info: Mapping[str, object]) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def progress(self, what: str, done: int, total: int) -> None:
        pass

    def state(self, snapshot: Mapping[str, float]) -> None:
        pass

    def step(self, metrics: Mapping[str, float]) -> None:
        pass

    def finished(self, result: Mapping[str, object]) -> None:
        pass

    def close(self) -> None:
        pass

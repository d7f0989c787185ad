"""Interface of views and metrics loggers, in plain types.

Metrics of a step are those of `metrics.jsonl`; docs/metrics.md explains every key. Each may be missing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

GROUP_ENDINGS = ("trained", "stepped", "stale", "filtered", "failed", "cancelled")
"""Endings of groups in the ledger."""
GROUP_STAGES = ("live", "ready", "leased")
"""Stages of groups that have not ended."""


class Observer(Protocol):
    """Shows or records a run. No method may block or raise."""

    def started(self, info: Mapping[str, object]) -> None:
        """The run started. `info` has the texts `name, dir, model, env, agent`, and the numbers `steps` and
        `resumed_from` (None in a new run)."""

    def note(self, text: str) -> None:
        """Shows one line of text."""

    def progress(self, what: str, done: int, total: int) -> None:
        """`done` of `total` parts of an activity are complete; it ends when they are equal."""

    def state(self, snapshot: Mapping[str, float]) -> None:
        """The current state: `groups/<stage or ending>`, `version`, `attempts/live`, and `tokens_per_s` or
        `tokens/sampled_total`."""

    def step(self, metrics: Mapping[str, float]) -> None:
        """Metrics of a completed step or of an evaluation (step 0: before the first step)."""

    def finished(self, result: Mapping[str, object]) -> None:
        """The run ended. `result` has `status` (completed, interrupted, failed), `why`, `before` and `after`
        (metrics of the first and the last evaluation, or None), the paths `checkpoint` and `report`, and
        `resume`, the command that continues the run."""

    def close(self) -> None:
        """Restores the terminal; may be called twice."""


class ForwardingObserver(ABC):
    """Hands every call on by its name, in `forward`."""

    @abstractmethod
    def forward(self, method: str, *arguments: object) -> None: ...

    def started(self, info: Mapping[str, object]) -> None:
        self.forward("started", info)

    def note(self, text: str) -> None:
        self.forward("note", text)

    def progress(self, what: str, done: int, total: int) -> None:
        self.forward("progress", what, done, total)

    def state(self, snapshot: Mapping[str, float]) -> None:
        self.forward("state", snapshot)

    def step(self, metrics: Mapping[str, float]) -> None:
        self.forward("step", metrics)

    def finished(self, result: Mapping[str, object]) -> None:
        self.forward("finished", result)

    def close(self) -> None:
        self.forward("close")


class Silent(ForwardingObserver):
    """An observer that shows nothing."""

    def forward(self, method: str, *arguments: object) -> None: ...


class CompositeObserver(ForwardingObserver):
    """Forwards every call to each observer, in order; closes them in reverse order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.observers = observers

    def forward(self, method: str, *arguments: object) -> None:
        for observer in reversed(self.observers) if method == "close" else self.observers:
            getattr(observer, method)(*arguments)

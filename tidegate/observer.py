"""Who watches a run, and what they are told, in plain types. Observing never changes what is observed.

Metrics of a step are those of `metrics.jsonl`; docs/metrics.md explains every key. Each may be missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

GROUP_ENDINGS = ("trained", "stepped", "stale", "filtered", "failed", "cancelled")
"""How a group ends, in the ledger's words."""
GROUP_STAGES = ("live", "ready", "leased")
"""Where a group that has not ended is."""


class Observer(Protocol):
    """Something that shows a run while it goes on. No method waits, and none stops the run."""

    def started(self, info: Mapping[str, object]) -> None:
        """`name, dir, model, env, agent, steps, gateway, resumed_from`: texts; `steps` and
        `resumed_from` are numbers of steps, the latter None in a new run."""

    def note(self, text: str) -> None:
        """One line of news."""

    def progress(self, what: str, done: int, total: int) -> None:
        """`what` has come to `done` of `total`; it has ended where they are equal."""

    def state(self, snapshot: Mapping[str, float]) -> None:
        """What is going on now: `groups/<stage or ending>`, `version`, `attempts/live`, and
        `tokens_per_s` or `tokens/sampled_total`."""

    def step(self, metrics: Mapping[str, float]) -> None:
        """The metrics of a step that was taken, or of an evaluation (step 0: before the first step)."""

    def finished(self, result: Mapping[str, object]) -> None:
        """`status` (completed, interrupted, failed), `why`, `before` and `after` (metrics of the first
        and the last evaluation, or None), and where things are: `checkpoint`, `report`; `resume` is the
        command that goes on from there."""

    def close(self) -> None:
        """Give the terminal back; may be called twice."""


class Silent:
    """A view that shows nothing."""

    def started(self, info: Mapping[str, object]) -> None: ...
    def note(self, text: str) -> None: ...
    def progress(self, what: str, done: int, total: int) -> None: ...
    def state(self, snapshot: Mapping[str, float]) -> None: ...
    def step(self, metrics: Mapping[str, float]) -> None: ...
    def finished(self, result: Mapping[str, object]) -> None: ...
    def close(self) -> None: ...

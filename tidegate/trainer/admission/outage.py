"""Detects outages: no episode can succeed, and the policy is not the cause. No clock, no I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tidegate.trainer.ledger.entries import LedgerEntry, entry
from tidegate.types import Outcome

WINDOW = 16
THRESHOLD = 8
INCONCLUSIVE = (Outcome.INFRA_ERROR, Outcome.TIMEOUT, Outcome.REWARD_ERROR, Outcome.CANCELLED)
"""Outcomes of a probe after which the outage may still be in progress."""


@dataclass(slots=True)
class Outage:
    """Outage state, from engine reports and from the outcomes of attempts.

    `down` is set while no engine serves. An outage of another cause is suspected when `THRESHOLD` of the last
    `WINDOW` attempts ended `infra_error`. Then one attempt at a time, the probe, tests whether it is over. A
    probe that ends `timeout` or `reward_error` is inconclusive: a service that hangs has the same effect.
    So is one that is cancelled, as its worker was lost.
    """

    record: Callable[[LedgerEntry], None]
    """Receives a ledger entry when an outage begins or ends."""
    down: str | None = None
    suspected: str | None = None
    probe: str | None = None
    _recent: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _ended_outages: int = 0
    _running: dict[str, int] = field(default_factory=dict)
    """Attempt that runs, or whose group has not ended → `_ended_outages` when it started."""

    @property
    def why(self) -> str | None:
        """Cause of the current outage; None if there is none."""
        return self.down or self.suspected

    def may_attempt(self) -> bool:
        """Whether an attempt may start now."""
        return self.down is None and (self.suspected is None or self.probe is None)

    def set_down(self, down: str | None) -> None:
        """Set the reason why nothing can be sampled; None if sampling works."""
        before = self.why
        if self.down is not None:
            self._recent.clear()  # outcomes during the outage do not predict those after it
        if down is not None:
            self.probe = None  # it fails whether or not the other outage is over
        self.down = down
        self._record_change(before)

    def started(self, attempt: str) -> None:
        self._running[attempt] = self._ended_outages
        if self.suspected is not None:
            self.probe = attempt

    def overlapped(self, attempt: str) -> bool:
        """Whether an outage was in progress at any time while the attempt ran."""
        return self.why is not None or self._running.get(attempt, self._ended_outages) < self._ended_outages

    def leaves_uncharged(self, attempt: str, outcome: Outcome) -> bool:
        """Whether a failure is charged to no budget: an outage was in progress while the attempt ran, and it
        was not a probe that ends the outage."""
        return self.overlapped(attempt) and not (attempt == self.probe and outcome not in INCONCLUSIVE)

    def ended(self, attempt: str, outcome: Outcome, why: str | None, *, slow: bool = False) -> None:
        """Record the outcome of an attempt that was not cancelled.

        One that timed out while it waited for engines that serve (`slow`) ends an outage as a success does.
        """
        before, infra, overlapped = self.why, outcome is Outcome.INFRA_ERROR, self.overlapped(attempt)
        if not outcome.trainable:  # else its group may still fail
            self._running.pop(attempt, None)
        if attempt == self.probe:
            self.probe = None
            if slow or outcome not in INCONCLUSIVE:
                self.suspected = None
                self._recent.clear()
        elif not overlapped:
            self._recent.append(infra)
            if infra and sum(self._recent) >= THRESHOLD:
                cause = f", the last: {why.splitlines()[0]}" if why else ""
                self.suspected = (
                    f"{THRESHOLD} of the last {len(self._recent)} attempts ended infra_error{cause}"
                )
                self._recent.clear()
        self._record_change(before)

    def forget(self, attempt: str) -> None:
        """Ignore an attempt that was cancelled, or whose group has ended."""
        self._running.pop(attempt, None)
        if attempt == self.probe:
            self.probe = None

    def _record_change(self, before: str | None) -> None:
        now = self.why
        self._ended_outages += before is not None and now is None
        if (before is None) != (now is None):
            self.record(entry("run", "resumed" if now is None else "paused", why=now or before))

"""Whether an outage is on: nothing can succeed, and the policy is not the cause. No clock, no I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tidegate.trainer.ledger.entries import LedgerEntry, entry
from tidegate.types import Outcome

WINDOW = 16
MOST = 8


@dataclass(slots=True)
class Outage:
    """Judges by what it is told and by how attempts end.

    `down` is told by whoever knows that nothing can be sampled. Any other outage shows in the attempts: it is
    suspected where `MOST` of the last `WINDOW` ended `infra_error`. Then one attempt at a time, the probe,
    finds out whether it is over.
    """

    book: Callable[[LedgerEntry], None]
    """Told when an outage begins and ends."""
    down: str | None = None
    suspected: str | None = None
    probe: str | None = None
    _recent: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW))

    @property
    def why(self) -> str | None:
        """What is out, in words; None where nothing is."""
        return self.down or self.suspected

    def may_attempt(self) -> bool:
        """Whether an attempt may start now."""
        return self.down is None and (self.suspected is None or self.probe is None)

    def report(self, down: str | None) -> None:
        """Nothing can be sampled for this reason; None: it can."""
        before = self.why
        if self.down is not None:
            self._recent.clear()  # what ended meanwhile tells nothing of the time after it
        self.down = down
        self._note(before)

    def started(self, attempt: str) -> None:
        if self.suspected is not None:
            self.probe = attempt

    def spares(self, attempt: str, outcome: Outcome) -> bool:
        """Whether a failure is not charged to the slot: it came in an outage, and not of a probe that found
        everything in order."""
        found = attempt == self.probe and outcome is not Outcome.INFRA_ERROR
        return self.why is not None and not found

    def ended(self, attempt: str, outcome: Outcome, why: str | None) -> None:
        """An attempt came to an end of its own."""
        before, infra = self.why, outcome is Outcome.INFRA_ERROR
        if attempt == self.probe:
            self.probe = None
            if not infra:
                self.suspected = None
                self._recent.clear()
        elif self.why is None:
            self._recent.append(infra)
            if infra and sum(self._recent) >= MOST:
                cause = f", the last: {why.splitlines()[0]}" if why else ""
                self.suspected = f"{MOST} of the last {len(self._recent)} attempts ended infra_error{cause}"
                self._recent.clear()
        self._note(before)

    def forget(self, attempt: str) -> None:
        """An attempt was cancelled, which tells nothing."""
        if attempt == self.probe:
            self.probe = None

    def _note(self, before: str | None) -> None:
        now = self.why
        if (before is None) != (now is None):
            self.book(entry("run", "resumed" if now is None else "paused", why=now or before))

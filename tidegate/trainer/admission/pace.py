"""Limit of running episodes while the engines are too slow for all of them. No clock, no I/O."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import fmean

SHARE = 0.5
"""Share of the deadline in which the engines are to serve an episode of mean length: some are longer."""
TOLERATED = 0.2
"""Share of the attempts that may time out before the limit is lowered."""
WINDOW = 32
"""Number of the newest successful attempts whose mean length counts."""


@dataclass(slots=True, kw_only=True)
class Pace:
    """Number of episodes that may run, from the outcomes of attempts and the engines' tokens per second.

    There is no limit until more than TOLERATED of the attempts have timed out while a call waited for engines
    that serve. Then as many may run as the engines serve within SHARE of the deadline. If attempts that began
    under a limit time out again, it is halved; it rises by one when as many attempts as it allows succeed.
    """

    deadline_s: float = math.inf
    """Deadline of an episode."""
    tokens: float = 0.0
    """Assumed length of an episode until one has succeeded."""
    rate: float = 0.0
    """Highest number of tokens per second that the engines have sampled; 0 if unknown."""
    limit: float = math.inf
    _running: dict[str, int] = field(default_factory=dict)
    """Running attempt → `_changes` when it began."""
    _changes: int = 0
    _lengths: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _slow: int = 0
    """Attempts that timed out so, and that succeeded, of those that began since the last change."""
    _succeeded: int = 0

    @property
    def free(self) -> float:
        """Number of episodes that may start now."""
        return max(1.0, self.limit) - len(self._running)

    def measured(self, tokens_per_s: float) -> None:
        """Take in the engines' present rate."""
        # Not the last one: with few episodes, engines sample less than they could.
        self.rate = max(self.rate, tokens_per_s)

    def started(self, attempt: str) -> None:
        self._running[attempt] = self._changes

    def forget(self, attempt: str) -> None:
        """Ignore an attempt that ended for another reason."""
        self._running.pop(attempt, None)

    def ended(self, attempt: str, tokens: float, *, slow: bool) -> None:
        """Record an attempt that succeeded with so many sampled tokens, or timed out (`slow`)."""
        running, began = len(self._running), self._running.pop(attempt, self._changes)
        if not slow:
            self._lengths.append(tokens)
            self.limit += 1 / max(1.0, self.limit)
        # It began under the limit before, about which enough is known.
        if began < self._changes:
            return
        self._slow += slow
        self._succeeded += not slow
        if slow and self._slow > TOLERATED * (self._slow + self._succeeded):
            self._lower(running)

    def _lower(self, running: int) -> None:
        length = fmean(self._lengths) if self._lengths else self.tokens
        half = min(self.limit, running) / 2
        served = self.rate * self.deadline_s * SHARE / length if self.rate and length else half
        self.limit = max(1.0, min(served, half) if self.limit < math.inf else served)
        self._changes, self._slow, self._succeeded = self._changes + 1, 0, 0

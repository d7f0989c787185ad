"""Pauses the run during an outage, reports the pause and limits its length."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from tidegate.errors import OutageError
from tidegate.service import backoff
from tidegate.trainer.admission.core import Admission
from tidegate.trainer.waits import wait_at_most

BACKOFF_S = 0.25
BACKOFF_MAX_S = 8.0
INFRA_BACKOFF_MAX_S = 60.0
POLL_S = 1.0
"""Longest interval between two checks of waiting tasks."""
NO_ENGINE = "no engine serves"
NO_WORKER = "waiting for workers: none is connected"


@dataclass(slots=True, kw_only=True)
class Pause:
    """Pause of the run while admission sees an outage. Call `update` after every possible change of it."""

    admission: Admission
    note: Callable[[str], None]
    limit_s: float
    count: int = 0
    """Number of outages so far."""
    _missing: dict[str, str] = field(default_factory=dict)
    """Causes, by NO_ENGINE or NO_WORKER."""
    _past_s: float = 0.0
    _since: float | None = None
    _probes: int = 0
    """Failed probes in this outage."""
    _next_probe: float = 0.0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _jitter: random.Random = field(default_factory=lambda: random.Random(0))

    @property
    def active(self) -> bool:
        return self._since is not None

    @property
    def engines_down(self) -> bool:
        return self.admission.outage.down is not None

    @property
    def seconds(self) -> float:
        """Total duration of all outages, including the current one."""
        return self._past_s + (0.0 if self._since is None else time.monotonic() - self._since)

    def set_serving(self, serving: bool, missing: str = NO_ENGINE, policies: Collection[str] = ()) -> None:
        """Report whether engines serve; or with `missing` = NO_WORKER, whether any worker does.

        `policies` are those that no engine serves, if engines of others may.
        """
        of = f" policy {', '.join(sorted(policies))}" if any(policies) else ""
        if serving:
            self._missing.pop(missing, None)
        else:
            self._missing[missing] = missing + of
        self.admission.outage.set_down(min(self._missing.values(), default=None))
        self.update()

    def update(self, probe_failed: bool = False) -> None:
        """Report the beginning and end of an outage; a failed probe delays the next one."""
        why, now = self.admission.outage.why, time.monotonic()
        if why is not None and self._since is None:
            self.count, self._since, self._probes, self._next_probe = self.count + 1, now, 0, now
            self.note(f"paused by an outage: {why}. {self._until_over()}")
        elif why is None and self._since is not None:
            self.note(f"resumed: the outage lasted {now - self._since:.0f} s")
            self._past_s, self._since = self._past_s + now - self._since, None
        if probe_failed and self.active:
            self._probes += 1
            self._next_probe = now + backoff_s(self._probes, self._jitter)
        self._changed.set()
        self._changed = asyncio.Event()

    def _until_over(self) -> str:
        if self.engines_down:
            return "Until it is over, no attempt starts"
        return "Until it is over, one attempt at a time runs as a probe"

    async def wait(self) -> None:
        """Wait until an attempt may start; outside an outage return at once."""
        while not self._may_start():
            await wait_at_most(self._changed, POLL_S)

    def _may_start(self) -> bool:
        backing_off = self.active and time.monotonic() < self._next_probe
        return self.admission.may_attempt() and not backing_off

    def check(self) -> None:
        """Raises OutageError if the outage has lasted longer than `limit_s`."""
        lasted_s = 0.0 if self._since is None else time.monotonic() - self._since
        if lasted_s > self.limit_s:
            raise OutageError(
                f"the outage has lasted {lasted_s:.0f} s, longer than trainer.outage_s = "
                f"{self.limit_s:g}: {self.admission.outage.why}. When it is over, continue with --resume"
            )

    def metrics(self) -> dict[str, float]:
        return {
            "outage/now": float(self.active),
            "outage/count": float(self.count),
            "outage/seconds": self.seconds,
        }


def backoff_s(failures: int, rng: random.Random, longest_s: float = BACKOFF_MAX_S) -> float:
    """Return the seconds to wait after `failures` of a slot."""
    return backoff.backoff_s(max(1, failures), BACKOFF_S, longest_s, rng)

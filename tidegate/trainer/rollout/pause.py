"""The pause that an outage makes: who waits, what is said of it, and how long it may last."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tidegate.errors import OutageError
from tidegate.trainer.admission.core import Admission

BACKOFF_S = 0.25
BACKOFF_MAX_S = 8.0
INFRA_BACKOFF_MAX_S = 60.0
LOOK_S = 1.0
"""How often those who wait look again, at the latest."""
NO_ENGINE = "no engine serves"


@dataclass(slots=True)
class Pause:
    """Follows admission's view of outages. `look` is called after whatever may have changed it."""

    admission: Admission
    note: Callable[[str], None]
    limit_s: float
    clock: Callable[[], float] = time.monotonic
    count: int = 0
    """Outages so far."""
    _over_s: float = 0.0
    _since: float | None = None
    _probes: int = 0
    """That failed in this outage."""
    _rest_until: float = 0.0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _jitter: random.Random = field(default_factory=lambda: random.Random(0))

    @property
    def on(self) -> bool:
        return self._since is not None

    @property
    def engines_down(self) -> bool:
        return self.admission.outage.down is not None

    @property
    def seconds(self) -> float:
        """Of all outages, the present one included."""
        return self._over_s + (0.0 if self._since is None else self.clock() - self._since)

    def engines(self, serving: bool) -> None:
        """Whether any engine serves."""
        self.admission.outage.report(None if serving else NO_ENGINE)
        self.look()

    def look(self, probe_failed: bool = False) -> None:
        """Note the beginning and the end of an outage; a failed probe keeps the next one waiting."""
        why, now = self.admission.outage.why, self.clock()
        if why is not None and self._since is None:
            self.count, self._since, self._probes, self._rest_until = self.count + 1, now, 0, now
            self.note(f"paused, as an outage is on: {why}. No group starts until it is over")
        elif why is None and self._since is not None:
            self.note(f"resumed: the outage lasted {now - self._since:.0f} s")
            self._over_s, self._since = self._over_s + now - self._since, None
        if probe_failed and self.on:
            self._probes += 1
            self._rest_until = now + backoff_s(self._probes, self._jitter)
        self._changed.set()
        self._changed = asyncio.Event()

    async def turn(self) -> None:
        """Wait until an attempt may start: at once, but in an outage."""
        while not self._free():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._changed.wait()

    def _free(self) -> bool:
        rests = self.on and self.clock() < self._rest_until
        return self.admission.outage.may_attempt() and not rests

    def check(self) -> None:
        """Raises OutageError where the outage has lasted too long."""
        if self._since is not None and self.clock() - self._since > self.limit_s:
            raise OutageError(
                f"the outage has lasted {self.clock() - self._since:.0f} s, and trainer.outage_s = "
                f"{self.limit_s:g} is the limit: {self.admission.outage.why}. When it is over, go on "
                "with --resume"
            )

    def metrics(self) -> dict[str, float]:
        return {
            "outage/now": float(self.on),
            "outage/count": float(self.count),
            "outage/seconds": self.seconds,
        }


def backoff_s(failures: int, rng: random.Random, longest_s: float = BACKOFF_MAX_S) -> float:
    """Seconds until what failed so often is attempted again: twice as long each time, up to a bound,
    and drawn from the upper half, so that slots which failed together do not come back together."""
    longest = min(longest_s, BACKOFF_S * 2 ** max(1, failures))
    return rng.uniform(longest / 2, longest)

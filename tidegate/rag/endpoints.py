"""Selects the server of a client's next call; servers that failed have a cooldown."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tidegate.errors import ConfigError

_FIRST_COOLDOWN_S, _MAX_COOLDOWN_S = 0.1, 5.0


@dataclass(slots=True)
class RagEndpoint:
    """One server; times are in seconds on the caller's clock."""

    url: str
    busy: int = 0
    """Calls in progress."""
    failures: int = 0
    """Consecutive failures."""
    cooldown_until: float = 0.0

    def succeeded(self) -> None:
        self.failures, self.cooldown_until = 0, 0.0

    def failed(self, began: float, now: float) -> None:
        """Records the failure of a call that began at `began`; the cooldown doubles with each failure.

        Calls that ran at the same time count as one failure.
        """
        if began < self.cooldown_until:
            return
        self.failures += 1
        longest = min(_MAX_COOLDOWN_S, _FIRST_COOLDOWN_S * 2 ** (self.failures - 1))
        self.cooldown_until = now + longest * random.uniform(0.5, 1.0)


class RagEndpoints:
    """The servers of one client, at least one."""

    def __init__(self, urls: Sequence[str]) -> None:
        if not urls:
            raise ConfigError("a search client needs the URL of at least one server")
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ConfigError(
                    f"{url!r} is not a retrieval server's URL: it must begin with http:// or https://"
                )
        self._servers = [RagEndpoint(url.rstrip("/")) for url in dict.fromkeys(urls)]

    def next(self, now: float) -> tuple[RagEndpoint, float]:
        """Returns the least busy server without a cooldown, and 0; or that with the shortest cooldown, and
        the seconds to wait for it (with jitter, so that clients do not retry at the same time)."""
        available = [server for server in self._servers if server.cooldown_until <= now]
        if available:
            least = min(server.busy for server in available)
            return random.choice([server for server in available if server.busy == least]), 0.0
        soonest = min(self._servers, key=lambda server: server.cooldown_until)
        return soonest, (soonest.cooldown_until - now) * random.uniform(1.0, 1.5)

"""The servers of one client: which one is asked next, and which are left alone for a while."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tidegate.errors import ConfigError

_FIRST_REST_S, _LONGEST_REST_S = 0.1, 5.0


@dataclass(slots=True)
class RagEndpoint:
    """One address; times are of the caller's clock, in seconds."""

    url: str
    busy: int = 0
    """Calls under way."""
    failures: int = 0
    """In a row."""
    rests_until: float = 0.0

    def succeeded(self) -> None:
        self.failures, self.rests_until = 0, 0.0

    def failed(self, began: float, now: float) -> None:
        """A call failed that began at `began`: the server rests, longer each time.

        Calls that were under way together fail together; they count as one failure.
        """
        if began < self.rests_until:
            return
        self.failures += 1
        longest = min(_LONGEST_REST_S, _FIRST_REST_S * 2 ** (self.failures - 1))
        self.rests_until = now + longest * random.uniform(0.5, 1.0)


class RagEndpoints:
    """At least one server."""

    def __init__(self, urls: Sequence[str]) -> None:
        if not urls:
            raise ConfigError("a search client needs the URL of at least one server")
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ConfigError(f"{url!r} is no retrieval server's URL: it begins with http:// or https://")
        self._servers = [RagEndpoint(url.rstrip("/")) for url in dict.fromkeys(urls)]

    def next(self, now: float) -> tuple[RagEndpoint, float]:
        """The least busy server that does not rest, and 0; or the one that rests for the shortest time, and
        the seconds to wait for it (with jitter, so that who waits together does not come back together)."""
        fresh = [server for server in self._servers if server.rests_until <= now]
        if fresh:
            least = min(server.busy for server in fresh)
            return random.choice([server for server in fresh if server.busy == least]), 0.0
        soonest = min(self._servers, key=lambda server: server.rests_until)
        return soonest, (soonest.rests_until - now) * random.uniform(1.0, 1.5)

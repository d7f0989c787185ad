"""An engine as the gateway sees it, and the seat that a session has with one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, NamedTuple

DEFAULT_CALLS = 256
"""Calls at once on an engine that does not tell how many it can run."""


class EngineRecord(NamedTuple):
    """What is kept of an engine over a restart of the gateway."""

    url: str
    control: tuple[str, ...] = ()
    joined: bool = False
    admitted: bool = True


@dataclass(eq=False, slots=True)
class EngineEndpoint:
    """One address that samples: an engine, or a router with the engines behind it."""

    url: str
    control: tuple[str, ...]
    """Where control calls go: its own address, or those of the engines behind a router."""
    joined: bool = False
    """Somebody added it; else the trainer did, or the command line."""
    admitted: bool = True
    """Not where it waits for the trainer, which has yet to bring it to the live version."""
    healthy: bool = False
    """Whether it is well; not before it answered a probe, and not in quarantine."""
    quarantined: bool = False
    max_context: int | None = None
    weight_version: str | None = None
    failures: int = 0
    limit: int = DEFAULT_CALLS
    """Calls that may be under way at once; what comes beyond waits in a fair line."""
    busy: int = 0
    """Slots taken, of `limit`."""
    seats: int = 0
    """Sessions that sit here."""
    calls: dict[str, asyncio.Timeout] = field(default_factory=dict)
    """Calls under way, by request id; the timeout ends one that waits on an engine that hangs."""

    @property
    def state(self) -> str:
        if self.quarantined:
            return "quarantined"
        if not self.admitted:
            return "waiting"
        return "healthy" if self.healthy else "starting"

    @property
    def serves(self) -> bool:
        """Whether it gets calls."""
        return self.healthy and self.admitted

    @property
    def free(self) -> bool:
        return self.serves and self.busy < self.limit

    @property
    def placed(self) -> EngineRecord:
        return EngineRecord(self.url, self.control, self.joined, self.admitted)

    def to_wire(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "control": list(self.control),
            "state": self.state,
            "joined": self.joined,
            "admitted": self.admitted,
            "healthy": self.healthy,
            "quarantined": self.quarantined,
            "calls": len(self.calls),
            "limit": self.limit,
            "sessions": self.seats,
            "weight_version": self.weight_version,
            "max_context": self.max_context,
        }


@dataclass(eq=False, slots=True)
class Affinity:
    """Where a session sits: the engine that has its prefix in cache.

    `flow` is the session, between which waiting calls take turns; `key` says what belongs together: the
    slots of a group share a prompt, so they are placed by their group.
    """

    flow: str
    key: str
    engine: EngineEndpoint | None = None
    disturbances: int = 0
    """How often a call of the session found no engine, or lost the one that it was on."""

    def take(self, engine: EngineEndpoint) -> None:
        self.leave()
        self.engine = engine
        engine.seats += 1

    def leave(self) -> None:
        """The session needs its place no more. Idempotent."""
        if self.engine is not None:
            self.engine.seats -= 1
            self.engine = None

"""The gateway's record of an engine, and the affinity of a session to one."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

DEFAULT_CALLS = 256
"""Concurrent calls on an engine that does not report `max_slots`."""
RATE_PROBES = 16
"""Number of probes over which an engine's rate is measured: half a minute at the default interval."""


class EngineRecord(NamedTuple):
    """The fields of an engine that survive a restart of the gateway."""

    url: str
    control: tuple[str, ...] = ()
    joined: bool = False
    admitted: bool = True
    policy: str = ""
    """Name of the policy, or of the first one, that it serves; empty in a run with one policy."""


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """Options of the pool; durations in seconds."""

    connect_s: float = 5.0
    probe_every_s: float = 2.0
    probe_timeout_s: float = 10.0
    """An engine that does not answer `/model_info` within this time counts as hanging."""
    engine_calls: int | None = None
    """Concurrent calls on one engine; None: twice its reported `max_slots`, or 256 without them."""
    waiting_calls: int = 8192
    """Largest number of calls that wait for a slot; further calls are refused."""
    shards: int = 1
    """Number of gateways that share the engines."""
    key: str | None = field(default=None, repr=False)
    """Key of the engines."""
    keeps_kv: bool = False
    """Engines keep keys and values when they load weights, and do not report their versions."""


@dataclass(eq=False, slots=True)
class EngineEndpoint:
    """An address that serves generation requests: an engine, or a router with engines behind it."""

    url: str
    control: tuple[str, ...]
    """Addresses for control calls: its own, or those of the engines behind a router."""
    joined: bool = False
    """Added by a client other than the trainer and the command line."""
    admitted: bool = True
    """False until the trainer has loaded the current policy version on it."""
    candidate: bool = False
    """It has a version that is not promoted yet, and serves only sessions that are to sample from it."""
    healthy: bool = False
    """True after a successful probe, false in quarantine."""
    quarantined: bool = False
    max_context: int | None = None
    _: KW_ONLY
    policy: str = ""
    """Name of the policy, or of the first one, that it serves; empty in a run with one policy."""
    weight_version: str | None = None
    version: int | None = None
    """Oldest version of its weights, and of those behind a router, when all reported one; None: never."""
    adapter: str | None = None
    """Label of `version` if requests must name its LoRA adapters (`requested_adapter`); else None."""
    adapters_in_use: dict[str, str] = field(default_factory=dict)
    """The label behind the adapter that each running call names, by request id."""
    failures: int = 0
    limit: int = DEFAULT_CALLS
    """Largest number of concurrent calls; further calls are queued."""
    busy: int = 0
    """Slots in use, of `limit`."""
    assigned_sessions: int = 0
    """Sessions whose affinity is this engine."""
    calls: dict[str, asyncio.Timeout] = field(default_factory=dict)
    """Timeouts of running calls, by request id; rescheduled to now when the engine hangs."""
    seen: float = -math.inf
    """Time of its last token or answered probe, on the event loop's clock."""
    received: int = 0
    """Tokens received from it."""
    _sampled: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RATE_PROBES))
    """Times of the last probes, and the number of tokens sampled until then."""

    @property
    def state(self) -> str:
        if self.quarantined:
            return "quarantined"
        if self.candidate:
            return "candidate" if self.healthy else "starting"
        if not self.admitted:
            return "waiting"
        return "healthy" if self.healthy else "starting"

    @property
    def serves(self) -> bool:
        """Whether it is in rotation for new calls."""
        return self.healthy and (self.admitted or self.candidate)

    def note_sampled(self, now: float, reported: int | None) -> None:
        """Record the tokens sampled so far: as the engine reports them, else those received."""
        total = self.received if reported is None else reported
        if self._sampled and total < self._sampled[-1][1]:  # it was restarted
            self._sampled.clear()
        self._sampled.append((now, total))

    @property
    def rate(self) -> float:
        """Tokens per second over the last probes."""
        if len(self._sampled) < 2:
            return 0.0
        (began, before), (ended, after) = self._sampled[0], self._sampled[-1]
        # Two probes may be noted at the same reading of the clock.
        return (after - before) / (ended - began) if ended > began else 0.0

    @property
    def has_free_slot(self) -> bool:
        return self.serves and self.busy < self.limit

    @property
    def record(self) -> EngineRecord:
        return EngineRecord(self.url, self.control, self.joined, self.admitted, self.policy)

    def to_wire(self) -> dict[str, Any]:
        fields = ("url", "state", "joined", "admitted", "candidate", "healthy", "quarantined", "limit")
        more = ("weight_version", "max_context", "policy")
        return {name: getattr(self, name) for name in (*fields, *more)} | {
            "control": list(self.control),
            "calls": len(self.calls),
            "tokens_per_s": round(self.rate, 1),
            "sessions": self.assigned_sessions,
        }


@dataclass(eq=False, slots=True)
class Affinity:
    """The engine of a session's calls to one policy, whose cache holds their prefix. `flow` is the unit of
    fair queueing: the session id, or the project key. `key` is hashed to choose the engine: the group id if
    there is one, because the slots of a group share a prompt."""

    flow: str
    key: str
    candidate: bool = False
    """Whether the session samples from the candidate version while there is one."""
    engine: EngineEndpoint | None = None
    disruptions: int = 0
    """Calls of the session that found no engine in rotation, or whose engine failed."""
    policy: str = ""
    """`EngineEndpoint.policy` of the engines that serve its calls."""

    def assign(self, engine: EngineEndpoint) -> None:
        self.release()
        self.engine = engine
        engine.assigned_sessions += 1

    def release(self) -> None:
        if self.engine is not None:
            self.engine.assigned_sessions -= 1
            self.engine = None

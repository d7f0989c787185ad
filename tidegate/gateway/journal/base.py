"""The journal: what a gateway writes down so that it can be killed and started again.

`Journal` itself keeps nothing: it is the journal of a gateway that was given no directory. `DiskJournal`
keeps everything. Each method returns when what it tells is written, or raises GatewayError with status
503, and then nothing of it was.

**What became of a reply.** A turn is written before its reply goes out, in state *sending*; that it went
out is written a little later. So after a crash a turn in state *sending* is *in doubt*: nobody knows
whether the client has the reply. It is decided by what is seen next:

- a later request that quotes the reply shows that it was delivered;
- a retry (its Idempotency-Key, or `x-stainless-retry-count ≥ 1` with the same body) is given this turn,
  and with that it is delivered;
- a session that is finished while its newest turn is in doubt was ended by a client that waits for
  nothing: the turn was delivered;
- a turn in doubt that is not the newest at the finish was not: another one was sampled instead of it. It
  stays in the record as undelivered, and is never trained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tidegate.types import Group

if TYPE_CHECKING:
    from tidegate.gateway.engines.engine import EngineRecord
    from tidegate.gateway.sessions.session import GatewaySession
    from tidegate.gateway.sessions.tree import TurnNode
    from tidegate.types import Trajectory


@dataclass(slots=True)
class Recovered:
    """What a journal held when its gateway started."""

    sessions: list[GatewaySession] = field(default_factory=list)
    entries: list[StoredGroup] = field(default_factory=list)
    """Groups that are ready or leased, in the order of sealing."""
    ended_groups: dict[str, str] = field(default_factory=dict)
    """What became of them, the oldest first."""
    ended_leases: dict[str, str] = field(default_factory=dict)
    epoch: int = 0
    orders: int = 0
    """The highest order that a group was ever sealed with."""
    engines: list[EngineRecord] = field(default_factory=list)
    led: bool = False
    """A trainer says which of them serve."""


class Journal:
    """Keeps nothing."""

    @property
    def problem(self) -> str | None:
        """Why nothing can be written at the moment, if so."""
        return None

    def start(self) -> Recovered:
        """Read what it holds, and be ready to write, on a running event loop. Raises StartError."""
        return Recovered()

    async def close(self) -> None:
        """Write what is under way, and let go."""

    async def opened(self, session: GatewaySession) -> None: ...

    def recorded(self, session: GatewaySession, nodes: Sequence[TurnNode]) -> asyncio.Future[None]:
        """Turns, before their replies go out: done when they are kept."""
        kept: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        kept.set_result(None)
        return kept

    def sent(self, session: GatewaySession, index: int) -> None:
        """The reply of a turn went out; written soon, waited for by nobody."""

    async def rewarded(self, session: GatewaySession, name: str, value: float, turn: int | None) -> None:
        """A reward was posted, for one turn or for the whole session."""

    async def closing(self, session: GatewaySession) -> None:
        """A session's `ending` is decided, and with it which of its turns were delivered."""

    async def finished(self, session: GatewaySession, trajectory: Trajectory, forget_at: float) -> None:
        """A session has its trajectory; it may be forgotten at `forget_at`, in the loop's time."""

    async def forgotten(self, sessions: Sequence[GatewaySession]) -> None:
        """Everything of these sessions is gone for good."""

    async def sealed(self, entry: StoredGroup) -> None: ...

    async def entered(self, epoch: int, fenced: Sequence[str]) -> None:
        """A newer trainer came; the leases `fenced` have ended."""

    async def leased(self, leases: Sequence[tuple[str, str, str]]) -> None:
        """Group id, lease id and the key of the request that they were leased for."""

    async def returned(self, groups: Sequence[str]) -> None:
        """Groups whose leases reached nobody are ready again."""

    async def ended(
        self, group_id: str, why: str, lease_id: str | None, sessions: Sequence[GatewaySession]
    ) -> None:
        """A group is over, with all of its sessions."""

    async def engines(self, engines: Sequence[EngineRecord], led: bool) -> None:
        """All engines there are, and whether a trainer says which of them serve."""


REMEMBERED = 65_536
"""Groups and leases that are over and still known by name."""


@dataclass(eq=False, slots=True)
class StoredGroup:
    group: Group
    order: int
    lease_id: str | None = None
    key: str = ""
    """Of the request that it was leased for."""
    answers: int = 0
    """How often this lease was handed out, less the answers that reached nobody."""

    @property
    def state(self) -> str:
        return "ready" if self.lease_id is None else "leased"

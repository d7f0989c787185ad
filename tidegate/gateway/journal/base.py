"""Interface of the journal, the gateway's database from which it recovers after a crash.

`Journal` stores nothing; a gateway without a journal directory uses it. `DiskJournal` stores everything. Each
method returns when its change is written, or raises GatewayError (503), and then none of it was written.

**Delivery of replies.** A turn is written before its reply is sent, in state *sending*; the delivery is
written shortly after. After a crash, a turn in state *sending* is *in doubt*: the client may or may not have
the reply. Later events decide:

- a later request that quotes the reply: delivered;
- a retry (same Idempotency-Key, or `x-stainless-retry-count ≥ 1` with the same body) gets this turn:
  delivered;
- the session is finished while its newest turn is in doubt: delivered, because the client waits for nothing;
- the turn is not the newest one at the finish: undelivered, because another one was sampled instead. It stays
  in the record and is never trained on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING

from tidegate.types import Group, ToolCall

if TYPE_CHECKING:
    from tidegate.gateway.engines.engine import EngineRecord
    from tidegate.gateway.sessions.session import GatewaySession
    from tidegate.gateway.sessions.tree import TurnNode
    from tidegate.types import Trajectory


@dataclass(slots=True)
class Recovered:
    """The contents of a journal when its gateway starts."""

    sessions: list[GatewaySession] = field(default_factory=list)
    entries: list[StoredGroup] = field(default_factory=list)
    """Groups that are ready or leased, in the order of sealing."""
    ended_groups: dict[str, str] = field(default_factory=dict)
    """Reason by group id, the oldest first."""
    ended_leases: dict[str, str] = field(default_factory=dict)
    erasures: list[str] = field(default_factory=list)
    """Groups whose erasure no trainer has acknowledged."""
    epoch: int = 0
    last_order: int = 0
    """Highest `StoredGroup.order` so far."""
    engines: list[EngineRecord] = field(default_factory=list)
    _: KW_ONLY
    trainer_managed: bool = False
    """A trainer decides which engines are in rotation."""


class Journal:
    """Stores nothing; the base class of journals."""

    @property
    def problem(self) -> str | None:
        """Why writing fails at the moment; None if it does not."""
        return None

    def load(self) -> Recovered:
        """Read the contents, before any write and on a running event loop. Raises StartError."""
        return Recovered()

    async def close(self) -> None:
        """Write pending changes and close the database."""

    def opened(self, session: GatewaySession) -> asyncio.Future[None]:
        """Write a session before its key is sent; the future resolves once it is written."""
        return _written()

    async def offered(self, sessions: Sequence[GatewaySession]) -> None:
        """Write that a worker took these sessions, or that they are queued again."""

    async def set_up(self, session: GatewaySession) -> None:
        """Write that a session's environment has made its state, before the session's first call."""

    async def tool_called(
        self, session: GatewaySession, number: int, call: ToolCall, key: str | None
    ) -> None:
        """Write a tool call before it is answered.

        Args:
            session: The session.
            number: Position among the session's tool calls.
            call: The call.
            key: Its idempotency key.
        """

    def recorded(self, session: GatewaySession, nodes: Sequence[TurnNode]) -> asyncio.Future[None]:
        """Write turns before their replies are sent; the future resolves once they are written."""
        return _written()

    def sent(self, session: GatewaySession, index: int) -> None:
        """Record that the reply of a turn was sent; written in the background."""

    async def rewarded(
        self, session: GatewaySession, name: str, value: float, turn: int | None, *, annotated: bool
    ) -> None:
        """Write a posted reward of a turn, or of the session if `turn` is None.

        `annotated`: the session's metadata changed as well.
        """

    async def closing(self, session: GatewaySession) -> None:
        """Write a session's `ending`, and which of its turns were delivered."""

    async def finished(self, session: GatewaySession, trajectory: Trajectory, forget_at: float) -> None:
        """Write a session's trajectory, which may be deleted at `forget_at` (loop time)."""

    async def forgotten(self, sessions: Sequence[GatewaySession]) -> None:
        """Delete all records of these sessions."""

    async def sealed(self, entry: StoredGroup, changed: Sequence[Trajectory] = ()) -> None:
        """Write a group, and those of its trajectories that changed since they were written."""

    async def entered(self, epoch: int, fenced: Sequence[str]) -> None:
        """Write the epoch of a newer trainer, and the end of the leases `fenced`."""

    async def leased(self, leases: Sequence[tuple[str, str, str]]) -> None:
        """Write leases: group id, lease id and the key of the lease request."""

    async def returned(self, groups: Sequence[str]) -> None:
        """Make groups ready again whose leases were not delivered."""

    async def ended(
        self,
        group_id: str,
        why: str,
        lease_id: str | None,
        sessions: Sequence[GatewaySession],
        *,
        erased: bool = False,
    ) -> None:
        """Delete a group that has ended, with all of its sessions; `erased`: a trainer must erase it, too."""

    async def erasures_acknowledged(self, groups: Sequence[str]) -> None:
        """Write that a trainer has erased these groups."""

    async def engines(self, engines: Sequence[EngineRecord], trainer_managed: bool) -> None:
        """Replace the stored engines, and whether a trainer manages them."""


def _written() -> asyncio.Future[None]:
    written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    written.set_result(None)
    return written


REMEMBERED = 65_536
"""Number of ended groups and leases whose ids are kept, so that late calls get a reason."""


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """What lists show of a sealed group; computed once, as a restart does not read its turns."""

    oldest_version: int | None
    newest_version: int | None
    reward: float | None
    """Mean reward of its episodes; None if none has one."""

    @classmethod
    def of(cls, group: Group) -> GroupSummary:
        rewards = [one.reward for one in group.trajectories if one.reward is not None]
        mean = sum(rewards) / len(rewards) if rewards else None
        return cls(group.oldest_version(), group.newest_version(), mean)


@dataclass(eq=False, slots=True)
class StoredGroup:
    """A sealed group."""

    id: str
    order: int
    sessions: list[str]
    """Ids of its sessions, in the order of their slots."""
    summary: GroupSummary
    read: Callable[[], Group]
    """Returns the group with its trajectories; slow after a restart, which decodes them."""
    _: KW_ONLY
    lease_id: str | None = None
    key: str = ""
    """Key of the lease request."""
    deliveries: int = 0
    """Responses that carried this lease, less those that were not delivered."""
    _group: Group | None = None

    @classmethod
    def of(cls, group: Group, order: int) -> StoredGroup:
        sessions = [trajectory.session_id for trajectory in group.trajectories]
        return cls(group.id, order, sessions, GroupSummary.of(group), lambda: group, _group=group)

    async def group(self) -> Group:
        """Return the group with its current lease; a thread reads it at the first call."""
        if self._group is None:
            self._group = await asyncio.to_thread(self.read)
        self._group.lease_id = self.lease_id or ""
        return self._group

    @property
    def state(self) -> str:
        return "ready" if self.lease_id is None else "leased"

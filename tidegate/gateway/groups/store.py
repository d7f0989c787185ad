"""Stores sealed groups and leases them to the trainer, with epoch fencing.

A lease ends when it is acknowledged, or when a trainer with a higher epoch starts; it never times out. So a
slow trainer keeps its leases, and a replaced one can neither lease nor acknowledge. Changes are serialised,
and each is in the journal before it is visible.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from tidegate.errors import GatewayError
from tidegate.gateway.journal.base import REMEMBERED, Journal, Recovered, StoredGroup
from tidegate.gateway.sessions.session import GatewaySession
from tidegate.types import Group

T = TypeVar("T")
ERASED = "erased"
"""End reason of a group whose client erased it; no other end replaces it."""


class _Recent(OrderedDict[str, str]):
    """The REMEMBERED newest ids that have ended, with the reason."""

    def note(self, key: str, value: str) -> None:
        self[key] = value
        self.move_to_end(key)
        if len(self) > REMEMBERED:
            self.popitem(last=False)


class GroupStore:
    """The only buffer between rollouts and the trainer. Raises GatewayErrors with a status."""

    def __init__(
        self,
        journal: Journal,
        members: Callable[[str], list[GatewaySession]],
        id_prefix: str = "",
        on_new_epoch: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_new_epoch` is called when a trainer with a higher epoch starts."""
        self._id_prefix = id_prefix
        self._on_new_epoch = on_new_epoch
        self._journal = journal
        self._members = members
        self._entries: dict[str, StoredGroup] = {}
        self._leases: dict[str, StoredGroup] = {}
        self._ended_leases, self._ended_groups = _Recent(), _Recent()
        self._erasures: dict[str, None] = {}
        """Erased groups that no trainer has acknowledged: they are kept, whatever else ends."""
        self._last_order = 0
        self._changing = asyncio.Lock()
        self._changed = asyncio.Condition()
        self.epoch = 0
        self.run_end: str | None = None
        """How the run ended that the gateway serves; None while it has not, and after a new one began."""
        self.sealed = 0
        self.acked: dict[str, int] = {}

    def restore(self, recovered: Recovered) -> None:
        self._entries = {entry.id: entry for entry in recovered.entries}
        self._leases = {entry.lease_id: entry for entry in recovered.entries if entry.lease_id is not None}
        self._ended_leases.update(recovered.ended_leases)
        self._ended_groups.update(recovered.ended_groups)
        self._erasures = dict.fromkeys(recovered.erasures)
        self._last_order, self.epoch = recovered.last_order, recovered.epoch

    def get(self, group_id: str) -> StoredGroup | None:
        return self._entries.get(group_id)

    def entries(self) -> list[StoredGroup]:
        return list(self._entries.values())

    def end_reason(self, group_id: str) -> str | None:
        """Why a group ended; None if it has not."""
        return ERASED if group_id in self._erasures else self._ended_groups.get(group_id)

    async def seal(self, group: Group, epoch: int | None = None, *, ranked: bool = False) -> None:
        """Make a group ready, for the trainer of that epoch. A stored group stays unchanged.

        `ranked`: its ranking changed its trajectories, which are written with it.
        """
        async with self._changing:
            self._check(epoch)
            # A repeated seal, whose first answer was lost, must not make a group that is leased ready
            # again.
            if group.id in self._entries:
                return
            if (ended := self.end_reason(group.id)) is not None:
                raise GatewayError(f"group {group.id} has ended: {ended}", status=410)
            entry = StoredGroup.of(group, self._last_order + 1)
            await self._journal.sealed(entry, group.trajectories if ranked else ())
            self._last_order += 1
            self.sealed += 1
            self._entries[group.id] = entry
        await self._notify()

    async def begin_epoch(self, epoch: int | None) -> None:
        """End all leases if the epoch is higher; refuse an older one. None: the caller is no trainer."""
        if epoch is None:
            return
        async with self._changing:
            if epoch > self.epoch:
                await self._journal.entered(epoch, list(self._leases))
                self.epoch, self.run_end = epoch, None
                # A copy, as `_end_lease` removes from it.
                for lease_id, entry in list(self._leases.items()):
                    self._end_lease(entry)
                    self._ended_leases.note(lease_id, "fenced")
                self._on_new_epoch()
                await self._notify()
            # After a newer epoch was entered, this also covers a trainer that was replaced while it
            # waited for the lock.
            self._check(epoch)

    async def lease(self, epoch: int, max_groups: int, wait_s: float, key: str = "") -> list[Group]:
        """Lease up to `max_groups` ready groups in the order of sealing; waits up to `wait_s` for the first.

        A repeated request with the same `key` gets the groups that it already leased; with `max_groups` 0 it
        gets only those, at once. A cancellation while groups are being leased is ignored: they are returned.
        """
        await self.begin_epoch(epoch)
        deadline = asyncio.get_running_loop().time() + wait_s
        while not (granted := await _uncancelled(self._grant(epoch, max_groups, key))) and max_groups > 0:
            try:
                async with asyncio.timeout_at(deadline), self._changed:
                    # A newer epoch ends the wait, so that a replaced trainer learns of it at once from
                    # `_grant`.
                    await self._changed.wait_for(lambda: self.epoch > epoch or self._has(key))
            except TimeoutError:
                return []
        return granted

    async def wait(self, epoch: int, wait_s: float) -> int:
        """Wait up to `wait_s` for a ready group without leasing it; returns the number of ready groups."""
        await self.begin_epoch(epoch)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s), self._changed:
                await self._changed.wait_for(lambda: self.epoch > epoch or bool(self._ready()))
        # Again, as a newer trainer may have started during the wait.
        self._check(epoch)
        return len(self._ready())

    async def _grant(self, epoch: int, max_groups: int, key: str) -> list[Group]:
        async with self._changing:
            self._check(epoch)
            # The answer to the first request was lost: other groups would leave these leased and never
            # trained on.
            held = self._held(key)
            if held:
                for entry in held:
                    # Of two requests with one key the first may be found disconnected only later; its
                    # `release` must not end the lease.
                    entry.deliveries += 1
                return [await entry.group() for entry in held]
            leased = [
                (entry, self._id_prefix + secrets.token_hex(12)) for entry in self._ready()[:max_groups]
            ]
            if leased:
                # One write for all: after a crash either all are leased or none, and a repeated key finds
                # the same groups.
                await self._journal.leased([(entry.id, lease_id, key) for entry, lease_id in leased])
            for entry, lease_id in leased:
                entry.lease_id = lease_id
                entry.key, entry.deliveries = key, 1
                self._leases[lease_id] = entry
            return [await entry.group() for entry, _ in leased]

    async def release(self, lease_ids: Sequence[str]) -> None:
        """Undo leases whose response was not delivered, except those requested again meanwhile."""
        async with self._changing:
            entries = []
            for entry in filter(None, map(self._leases.get, lease_ids)):
                entry.deliveries -= 1
                if entry.deliveries <= 0:
                    entries.append(entry)
            await self._journal.returned([entry.id for entry in entries])
            for entry in entries:
                self._end_lease(entry)
        await self._notify()

    async def wait_for_end(self, group_id: str, known: Callable[[], bool]) -> None:
        """Wait until a group or the run has ended, or the group is not `known` any more."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: self.end_reason(group_id) is not None or self.run_end is not None or not known()
            )

    async def end_run(self, epoch: int, why: str) -> None:
        """Tell all that wait for groups that the run has ended."""
        await self.begin_epoch(epoch)
        self.run_end = why
        await self._notify()

    async def ack(
        self, epoch: int, lease_id: str, outcome: str, why: str | None = None
    ) -> list[GatewaySession]:
        """End a lease and its group; returns the group's sessions, empty if already acknowledged.

        The group's end reason is `outcome`, or `outcome: why`.
        """
        await self.begin_epoch(epoch)
        async with self._changing:
            self._check(epoch)
            entry = self._leases.get(lease_id)
            if entry is None:
                reason = self._ended_leases.get(lease_id)
                if reason == "fenced":
                    raise GatewayError(f"lease {lease_id} ended when a newer trainer started", status=410)
                if reason is None:
                    raise GatewayError(f"there is no lease {lease_id}", status=404)
                # Acknowledged before: the answer was lost, and its repetition must succeed without
                # effect.
                return []
            members = await self._end(entry.id, outcome if why is None else f"{outcome}: {why}")
            self.acked[outcome] = self.acked.get(outcome, 0) + 1
        await self._notify()
        return members

    async def drop(
        self, group_id: str, epoch: int | None = None, why: str | None = None
    ) -> list[GatewaySession]:
        """End a group for the trainer of that epoch, leased or not; returns its sessions."""
        async with self._changing:
            self._check(epoch)
            members = await self._end(group_id, "dropped" if why is None else f"dropped: {why}")
        await self._notify()
        return members

    async def erase(self, group_id: str) -> list[GatewaySession]:
        """End a group as erased, whether it has ended or not; returns its sessions. Idempotent.

        Raises GatewayError (429) if too many erasures of its client wait for a trainer.
        """
        async with self._changing:
            # The limit counts by project key, so one client cannot use up the erasures of another.
            owner = group_id.partition(".")[0] + "."
            if group_id not in self._erasures and len(self._erasures) >= REMEMBERED:
                waiting = sum(one.startswith(owner) for one in self._erasures)
                if waiting >= REMEMBERED:
                    raise GatewayError(
                        f"{waiting} erasures of this key wait until a trainer has carried them out, which is "
                        "the limit; try again later",
                        status=429,
                    )
            members = await self._end(group_id, ERASED)
        await self._notify()
        return members

    def erased(self) -> list[str]:
        """Return the groups that clients erased: all that no trainer acknowledged, and the newest others."""
        others = (group_id for group_id, why in self._ended_groups.items() if why == ERASED)
        return list(dict.fromkeys([*self._erasures, *others]))

    async def acknowledge_erasures(self, groups: Sequence[str]) -> None:
        """Record that a trainer has carried out the erasure of these groups. Idempotent."""
        async with self._changing:
            if known := [group_id for group_id in groups if group_id in self._erasures]:
                await self._journal.erasures_acknowledged(known)
                for group_id in known:
                    del self._erasures[group_id]

    async def _end(self, group_id: str, why: str) -> list[GatewaySession]:
        again = self.end_reason(group_id) == ERASED
        why = ERASED if again else why
        entry = self._entries.get(group_id)
        lease_id = entry.lease_id if entry is not None else None
        members = self._members(group_id)
        await self._journal.ended(group_id, why, lease_id, members, erased=why == ERASED and not again)
        if why == ERASED and not again:
            # Apart from the bounded memory of ended groups: a forgotten erasure would leave data in the
            # trainer's stores.
            self._erasures[group_id] = None
        if lease_id is not None:
            self._leases.pop(lease_id, None)
            self._ended_leases.note(lease_id, why)
        self._entries.pop(group_id, None)
        self._ended_groups.note(group_id, why)
        return members

    def _end_lease(self, entry: StoredGroup) -> None:
        if entry.lease_id is not None:
            self._leases.pop(entry.lease_id, None)
        entry.lease_id, entry.key, entry.deliveries = None, "", 0

    def _has(self, key: str) -> bool:
        return bool(self._held(key)) or any(entry.lease_id is None for entry in self._entries.values())

    def _held(self, key: str) -> list[StoredGroup]:
        return [entry for entry in self._leases.values() if key and entry.key == key]

    def _ready(self) -> list[StoredGroup]:
        """The groups without a lease, in the order of sealing, in which they are added."""
        return [entry for entry in self._entries.values() if entry.lease_id is None]

    def _check(self, epoch: int | None) -> None:
        if epoch is not None and epoch < self.epoch:
            raise GatewayError(
                f"trainer epoch {epoch} is over: a trainer with epoch {self.epoch} replaced it", status=410
            )

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


async def _uncancelled(work: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine to its end even if the caller is cancelled."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        # Groups that are leased in the journal must reach the caller, which gives them back if its client
        # is gone.
        return await task

"""Sealed groups, in the order of sealing, handed to the trainer under fenced leases.

A lease ends when it is acknowledged, or when a trainer with a higher epoch comes: never by a clock. So
a trainer that is slow keeps what it holds, and one that was replaced can neither lease nor acknowledge.
Every change is in the journal before it is seen: changes come one at a time.
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


class _Recent(OrderedDict[str, str]):
    """A bounded memory of ids that are done with."""

    def note(self, key: str, value: str) -> None:
        self[key] = value
        self.move_to_end(key)
        if len(self) > REMEMBERED:
            self.popitem(last=False)


class GroupStore:
    """The only buffer between rollouts and the trainer. Refusals are GatewayErrors with a status."""

    def __init__(
        self,
        journal: Journal,
        members: Callable[[str], list[GatewaySession]],
        recovered: Recovered,
        mark: str = "",
        superseded: Callable[[], None] = lambda: None,
    ) -> None:
        """`superseded` is called whenever a newer trainer has come."""
        self._mark = mark
        self._superseded = superseded
        self._journal = journal
        self._members = members
        self._entries = {entry.group.id: entry for entry in recovered.entries}
        self._leases = {entry.lease_id: entry for entry in recovered.entries if entry.lease_id is not None}
        self._ended_leases = _Recent(recovered.ended_leases)
        self._done = _Recent(recovered.ended_groups)
        self._orders = recovered.orders
        self._changing = asyncio.Lock()
        self._changed = asyncio.Condition()
        self.epoch = recovered.epoch
        self.sealed = 0
        self.acked: dict[str, int] = {}

    def get(self, group_id: str) -> StoredGroup | None:
        return self._entries.get(group_id)

    def entries(self) -> list[StoredGroup]:
        return list(self._entries.values())

    def done(self, group_id: str) -> str | None:
        """What became of a group that was here."""
        return self._done.get(group_id)

    async def seal(self, group: Group, epoch: int | None = None) -> None:
        """Make a group ready, for the trainer of that epoch. A group that is here already stays as it is."""
        async with self._changing:
            self._check(epoch)
            if group.id in self._entries:
                return
            if group.id in self._done:
                raise GatewayError(f"group {group.id} has ended: {self._done[group.id]}", status=410)
            entry = StoredGroup(group, self._orders + 1)
            await self._journal.sealed(entry)
            self._orders += 1
            self.sealed += 1
            self._entries[group.id] = entry
        await self._notify()

    async def enter(self, epoch: int | None) -> None:
        """A higher epoch ends all leases; an older one is fenced off. None is no trainer's."""
        if epoch is None:
            return
        async with self._changing:
            if epoch > self.epoch:
                await self._journal.entered(epoch, list(self._leases))
                self.epoch = epoch
                for lease_id, entry in list(self._leases.items()):
                    self._release(entry)
                    self._ended_leases.note(lease_id, "fenced")
                self._superseded()
                await self._notify()
            self._check(epoch)

    async def lease(self, epoch: int, most: int, wait_s: float, key: str = "") -> list[Group]:
        """Up to `most` ready groups, the earliest sealed first; waits up to `wait_s` for the first one.

        A request that is sent again, with the same `key`, gets the groups that it was given before. A
        cancellation in the very moment of leasing is not obeyed: the groups are returned. With `most` 0
        these are all that it gets, at once.
        """
        await self.enter(epoch)
        deadline = asyncio.get_running_loop().time() + wait_s
        while not (granted := await _whole(self._grant(epoch, most, key))) and most > 0:
            try:
                async with asyncio.timeout_at(deadline), self._changed:
                    await self._changed.wait_for(lambda: self.epoch > epoch or self._has(key))
            except TimeoutError:
                return []
        return granted

    async def wait(self, epoch: int, wait_s: float) -> int:
        """Wait up to `wait_s` for a ready group, without leasing it; how many are ready."""
        await self.enter(epoch)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s), self._changed:
                await self._changed.wait_for(lambda: self.epoch > epoch or bool(self._ready()))
        self._check(epoch)
        return len(self._ready())

    async def _grant(self, epoch: int, most: int, key: str) -> list[Group]:
        async with self._changing:
            self._check(epoch)
            held = self._held(key)
            if held:
                for entry in held:
                    entry.answers += 1
                return [entry.group for entry in held]
            leased = [(entry, self._mark + secrets.token_hex(12)) for entry in self._ready()[:most]]
            if leased:
                await self._journal.leased([(entry.group.id, lease_id, key) for entry, lease_id in leased])
            for entry, lease_id in leased:
                entry.lease_id = entry.group.lease_id = lease_id
                entry.key, entry.answers = key, 1
                self._leases[lease_id] = entry
            return [entry.group for entry, _ in leased]

    async def give_back(self, lease_ids: Sequence[str]) -> None:
        """Undo leases whose answer reached nobody, but for those that were asked for again meanwhile."""
        async with self._changing:
            entries = []
            for entry in filter(None, map(self._leases.get, lease_ids)):
                entry.answers -= 1
                if entry.answers <= 0:
                    entries.append(entry)
            await self._journal.returned([entry.group.id for entry in entries])
            for entry in entries:
                self._release(entry)
        await self._notify()

    async def ack(self, epoch: int, lease_id: str, outcome: str) -> list[GatewaySession]:
        """End a lease and its group; the group's sessions, none where this was done before."""
        await self.enter(epoch)
        async with self._changing:
            self._check(epoch)
            entry = self._leases.get(lease_id)
            if entry is None:
                what = self._ended_leases.get(lease_id)
                if what == "fenced":
                    raise GatewayError(f"lease {lease_id} ended when a newer trainer came", status=410)
                if what is None:
                    raise GatewayError(f"there is no lease {lease_id}", status=404)
                return []
            members = await self._end(entry.group.id, outcome)
            self.acked[outcome] = self.acked.get(outcome, 0) + 1
            return members

    async def drop(self, group_id: str, epoch: int | None = None) -> list[GatewaySession]:
        """End a group, whoever holds it, for the trainer of that epoch; its sessions."""
        async with self._changing:
            self._check(epoch)
            return await self._end(group_id, "dropped")

    async def _end(self, group_id: str, why: str) -> list[GatewaySession]:
        entry = self._entries.get(group_id)
        lease_id = entry.lease_id if entry is not None else None
        members = self._members(group_id)
        await self._journal.ended(group_id, why, lease_id, members)
        if lease_id is not None:
            self._leases.pop(lease_id, None)
            self._ended_leases.note(lease_id, why)
        self._entries.pop(group_id, None)
        self._done.note(group_id, why)
        return members

    def _release(self, entry: StoredGroup) -> None:
        if entry.lease_id is not None:
            self._leases.pop(entry.lease_id, None)
        entry.lease_id, entry.group.lease_id, entry.key, entry.answers = None, "", "", 0

    def _has(self, key: str) -> bool:
        return bool(self._held(key)) or any(entry.lease_id is None for entry in self._entries.values())

    def _held(self, key: str) -> list[StoredGroup]:
        return [entry for entry in self._leases.values() if key and entry.key == key]

    def _ready(self) -> list[StoredGroup]:
        ready = [entry for entry in self._entries.values() if entry.lease_id is None]
        return sorted(ready, key=lambda entry: entry.order)

    def _check(self, epoch: int | None) -> None:
        if epoch is not None and epoch < self.epoch:
            raise GatewayError(
                f"trainer epoch {epoch} is over: epoch {self.epoch} holds the groups now", status=410
            )

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


async def _whole(work: Coroutine[Any, Any, T]) -> T:
    """Await what must not stop half-way, however its caller is cancelled."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        return await task

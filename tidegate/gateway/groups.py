"""Sealed groups, in the order of sealing, handed to the trainer under fenced leases.

A lease ends when it is acknowledged, or when a trainer with a higher epoch comes: never by a clock. So
a trainer that is slow keeps what it holds, and one that was replaced can neither lease nor acknowledge.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from dataclasses import dataclass

from tidegate.errors import GatewayError
from tidegate.types import Group

_REMEMBERED = 65_536


@dataclass(eq=False, slots=True)
class Entry:
    group: Group
    order: int
    lease_id: str | None = None

    @property
    def state(self) -> str:
        return "ready" if self.lease_id is None else "leased"


class _Recent(OrderedDict[str, str]):
    """A bounded memory of ids that are done with."""

    def note(self, key: str, value: str) -> None:
        self[key] = value
        self.move_to_end(key)
        if len(self) > _REMEMBERED:
            self.popitem(last=False)


class GroupStore:
    """The only buffer between rollouts and the trainer. Refusals are GatewayErrors with a status."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._leases: dict[str, Entry] = {}
        self._ended_leases = _Recent()
        self._done = _Recent()
        self._orders = 0
        self._changed = asyncio.Condition()
        self.epoch = 0
        self.sealed = 0
        self.acked: dict[str, int] = {}

    def get(self, group_id: str) -> Entry | None:
        return self._entries.get(group_id)

    def entries(self) -> list[Entry]:
        return list(self._entries.values())

    def done(self, group_id: str) -> str | None:
        """What became of a group that was here."""
        return self._done.get(group_id)

    async def seal(self, group: Group) -> None:
        """Make a group ready. A group that is here already stays as it is."""
        if group.id in self._entries:
            return
        if group.id in self._done:
            raise GatewayError(f"group {group.id} has ended: {self._done[group.id]}", status=410)
        self._orders += 1
        self.sealed += 1
        self._entries[group.id] = Entry(group, self._orders)
        await self._notify()

    async def lease(self, epoch: int, most: int, wait_s: float) -> list[Group]:
        """Up to `most` ready groups, the earliest sealed first; waits up to `wait_s` for the first one."""
        await self._enter(epoch)
        deadline = asyncio.get_running_loop().time() + wait_s
        while not (ready := self._ready()):
            try:
                async with asyncio.timeout_at(deadline), self._changed:
                    await self._changed.wait_for(lambda: self.epoch > epoch or bool(self._ready()))
            except TimeoutError:
                return []
            self._check(epoch)
        leased = []
        for entry in ready[:most]:
            entry.lease_id = entry.group.lease_id = secrets.token_hex(12)
            self._leases[entry.lease_id] = entry
            leased.append(entry.group)
        return leased

    async def give_back(self, groups: list[Group]) -> None:
        """Undo leases whose answer reached nobody."""
        for group in groups:
            entry = self._leases.pop(group.lease_id, None)
            if entry is not None:
                entry.lease_id, entry.group.lease_id = None, ""
        await self._notify()

    async def ack(self, epoch: int, lease_id: str, outcome: str) -> str | None:
        """End a lease and free its group; the group's id, None where this was done before."""
        await self._enter(epoch)
        entry = self._leases.pop(lease_id, None)
        if entry is None:
            what = self._ended_leases.get(lease_id)
            if what == "fenced":
                raise GatewayError(f"lease {lease_id} ended when a newer trainer came", status=410)
            if what is None:
                raise GatewayError(f"there is no lease {lease_id}", status=404)
            return None
        self._ended_leases.note(lease_id, outcome)
        self.acked[outcome] = self.acked.get(outcome, 0) + 1
        self._remove(entry, outcome)
        return entry.group.id

    def drop(self, group_id: str) -> None:
        """Free a group, whoever holds it."""
        entry = self._entries.get(group_id)
        if entry is None:
            self._done.note(group_id, "dropped")
            return
        if entry.lease_id is not None:
            self._leases.pop(entry.lease_id, None)
            self._ended_leases.note(entry.lease_id, "dropped")
        self._remove(entry, "dropped")

    def _remove(self, entry: Entry, why: str) -> None:
        del self._entries[entry.group.id]
        self._done.note(entry.group.id, why)

    def _ready(self) -> list[Entry]:
        ready = [entry for entry in self._entries.values() if entry.lease_id is None]
        return sorted(ready, key=lambda entry: entry.order)

    async def _enter(self, epoch: int) -> None:
        """A higher epoch ends all leases; an older one is fenced off."""
        if epoch > self.epoch:
            self.epoch = epoch
            for lease_id, entry in self._leases.items():
                entry.lease_id, entry.group.lease_id = None, ""
                self._ended_leases.note(lease_id, "fenced")
            self._leases.clear()
            await self._notify()
        self._check(epoch)

    def _check(self, epoch: int) -> None:
        if epoch < self.epoch:
            raise GatewayError(
                f"trainer epoch {epoch} is over: epoch {self.epoch} holds the groups now", status=410
            )

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

"""Erases from a run's files what clients erased at the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from tidegate.errors import GatewayError
from tidegate.gateway.client import GatewayClient
from tidegate.trainer.ledger.entries import LedgerEntry, entry
from tidegate.trainer.records.trajectories import TrajectoryFiles

POLL_S = 5.0


@dataclass(slots=True)
class Erasure:
    """Follows the gateway's list of erased groups.

    The ledger gets its entry first: a crash before the files are rewritten is made good by `repeat`.

    Args:
        gateway: Client of the gateway.
        files: The run's trajectory files.
        record: Receives ledger entries.
        done: Ids of the groups that the ledger has as erased.
        note: Receives messages.
    """

    gateway: GatewayClient
    files: TrajectoryFiles
    record: Callable[[LedgerEntry], None]
    done: set[str]
    note: Callable[[str], None]

    def repeat(self) -> None:
        """Erase again what an earlier start of the run was to erase."""
        if self.done:
            self.files.erase(self.done)

    async def watch(self) -> None:
        """Poll for ever."""
        while True:
            await self.poll()
            await asyncio.sleep(POLL_S)

    async def poll(self) -> None:
        """Erase what has been erased at the gateway since."""
        try:
            new = set(await self.gateway.erased_groups()) - self.done
        except GatewayError:
            return  # it is restarting, and asked again
        for group in sorted(new):
            self.record(entry("run", "erased", group=group))
        if new:
            self.done |= new
            self.files.erase(new)  # on the event loop, as its other writers are
            self.note(f"erased {len(new)} conversations or groups of clients")

"""Applies clients' erasures, which the gateway records, to a run's files."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from tidegate.envs.judge.cache import erase_replies
from tidegate.errors import GatewayError
from tidegate.gateway.client import GatewayClient
from tidegate.trainer.ledger.entries import entry
from tidegate.trainer.ledger.ledger import Ledger
from tidegate.trainer.records.trajectories import TrajectoryFiles
from tidegate.trainer.records.writer import FileWriter

POLL_S = 5.0


@dataclass(slots=True, kw_only=True)
class Erasure:
    """Follows the gateway's list of erased groups.

    The ledger gets its entry first: a crash before the files are rewritten is made good by the next start.

    Args:
        gateway: Client of the gateway.
        files: The run's trajectory files.
        judge: Database of the judge's replies; it may not exist.
        writer: Runs all other calls that write these files.
        ledger: Ledger of the run.
        done: Ids of the groups that the ledger has as erased.
        note: Receives messages.
    """

    gateway: GatewayClient
    files: TrajectoryFiles
    judge: Path
    writer: FileWriter
    ledger: Ledger
    done: set[str]
    note: Callable[[str], None]
    withdraw: Callable[[Collection[str]], Awaitable[None]] | None = None
    """Withdraws groups that wait for a batch."""
    acknowledged: set[str] = field(default_factory=set)
    """Erasures that the gateway knows to be carried out, and need not keep."""

    async def watch(self) -> None:
        """Erase again what an earlier start of the run was to erase, then poll until cancelled."""
        if self.done:
            await self._erase(self.done)
        while True:
            await self.poll()
            await asyncio.sleep(POLL_S)

    async def poll(self) -> None:
        """Erase what has been erased at the gateway since."""
        try:
            erased = set(await self.gateway.erased_groups())
        except GatewayError:
            return  # the gateway may be restarting; the next poll repeats this
        new = erased - self.done
        for group in sorted(new):
            self.ledger.record(entry("run", "erased", group=group))
        if new:
            self.done |= new
            # Before texts are removed: each later start erases again what the ledger names.
            await self.ledger.durable()
            if self.withdraw is not None:
                await self.withdraw(new)
            await self._erase(new)
            self.note(f"erased {len(new)} conversations or groups of clients")
        if told := sorted(erased - self.acknowledged):
            with contextlib.suppress(GatewayError):  # the next poll repeats this
                await self.gateway.acknowledge_erasures(told)
                self.acknowledged |= erased

    async def _erase(self, groups: Collection[str]) -> None:
        await self.files.erase(groups, self.writer)
        await asyncio.to_thread(erase_replies, self.judge, groups)

"""Delays a publish that would make too many of the clients' unfinished conversations too stale."""

from __future__ import annotations

import asyncio
import contextlib
import math
from dataclasses import dataclass

from tidegate.config import TrainerSettings
from tidegate.errors import GatewayError
from tidegate.gateway.client import GatewayClient
from tidegate.trainer.waits import wait_at_most

POLL_S = 1.0


@dataclass(slots=True)
class PublishGate:
    """Clients call at any time, so a publish waits instead; the staleness bound holds in any case.

    Args:
        gateway: Client of the gateway.
        settings: Settings of the trainer: the staleness bound, `max_stale_share` and `gate_timeout_s`.
        stop: Set when the run is to end; the gate then opens.

    Attributes:
        waiting: Whether a publish waits.
    """

    gateway: GatewayClient
    settings: TrainerSettings
    stop: asyncio.Event
    waiting: bool = False

    async def wait(self, version: int) -> None:
        """Wait until `version` may be published, at most `gate_timeout_s`."""
        share = self.settings.max_stale_share
        if self.settings.staleness_bound is None or share is None:
            return
        self.waiting = True
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.settings.gate_timeout_s):
                    await self._wait(version, share)
        finally:
            self.waiting = False

    async def _wait(self, version: int, share: float) -> None:
        while not self.stop.is_set():
            with contextlib.suppress(GatewayError):  # it is restarting, and counted again
                if await self.lost_share(version) <= share:
                    return
            await wait_at_most(self.stop, POLL_S)

    async def lost_share(self, version: int) -> float:
        """Return the share of the unfinished conversations that `version` would make too stale."""
        bound = math.inf if (given := self.settings.staleness_bound) is None else given
        unended = [group.oldest_version for group in await self.gateway.list_groups() if group.unended]
        # A conversation without a sampled token can still begin with the new version.
        lost = sum(oldest is not None and version - oldest > bound for oldest in unended)
        return lost / len(unended) if unended else 0.0

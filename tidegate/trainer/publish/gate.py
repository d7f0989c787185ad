"""Delays a publish that would make too many of the clients' unfinished conversations too stale."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from tidegate.errors import GatewayError
from tidegate.gateway.client import GatewayClient

POLL_S = 1.0


@dataclass(slots=True)
class PublishGate:
    """Traffic cannot be told to wait, so a publish waits instead; the bound stays hard in any case.

    A conversation that gets feedback is trained on, and one that gets none ends after
    `gateway.feedback_window_s`. So the wait is bounded by that time.

    Args:
        gateway: Client of the gateway.
        bound: `max_staleness`; None if there is no bound.
        share: Share of the unfinished conversations that a publish may make too stale; None: any.
        stop: Set when the run is to end; the gate then opens.
    """

    gateway: GatewayClient
    bound: int | None
    share: float | None
    stop: asyncio.Event

    async def wait(self, version: int) -> None:
        """Wait until `version` may be published."""
        while not self.stop.is_set():
            try:
                if await self.lost_share(version) <= (1.0 if self.share is None else self.share):
                    return
            except GatewayError:
                pass  # it is restarting, and counted again
            await _unless_set(self.stop, POLL_S)

    async def lost_share(self, version: int) -> float:
        """Return the share of the unfinished conversations that `version` would make too stale."""
        if self.bound is None or self.share is None:
            return 0.0
        live = [group.oldest_version for group in await self.gateway.list_groups() if group.state == "live"]
        lost = sum(oldest is not None and version - oldest > self.bound for oldest in live)
        return lost / len(live) if live else 0.0


async def _unless_set(stop: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        pass

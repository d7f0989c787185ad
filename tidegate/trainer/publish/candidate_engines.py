"""Engines that serve a candidate version while it is tested; the others serve the live one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tidegate.gateway.client import GatewayClient
from tidegate.trainer.publish.engines import EngineMembership
from tidegate.trainer.publish.publisher import Publisher

DRAIN_S = 30.0
"""Longest wait for an engine's calls to end before it gets other weights; they then continue with these."""
POLL_S = 0.2


class CandidateEngines:
    """Takes engines out of service for a candidate, and returns them.

    Args:
        gateway: Client of the gateway.
        engines: The run's engines.
        publisher: Loads weights.
        number: Engines to take; at least one other stays in service.
        share: Share of the clients' new conversations that they serve.
    """

    def __init__(
        self,
        gateway: GatewayClient,
        engines: EngineMembership,
        publisher: Publisher,
        number: int,
        share: float,
    ) -> None:
        self._gateway = gateway
        self._engines = engines
        self._publisher = publisher
        self._number = number
        self._share = share

    async def ensure_serving(self, weights: Path, version: int) -> bool:
        """Have engines serve the candidate; returns whether all of them do.

        Repeat it while the candidate is tested: a restarted engine has the live version, and a restarted
        gateway has no record of the engines with the candidate.

        Raises:
            GatewayError: The gateway does not answer.
            PublishError: An engine refuses the weights.
        """
        rows = await self._rows()
        await self._reserve(rows)
        reserved = sorted(self._engines.reserved & rows.keys())
        addresses = [address for url in reserved for address in self._engines.control(url)]
        loaded = await self._publisher.load_candidate(addresses, weights, version)
        if not (loaded and len(reserved) == self._number):
            return False
        if not all(rows[url]["candidate"] for url in reserved):
            await self._gateway.set_candidate(reserved, self._share)
        return True

    async def release(self) -> None:
        """Return the engines to service, with the current version."""
        # First, so that no new conversation begins on these engines while they drain.
        await self._gateway.set_candidate([])
        await self._drain(set(self._engines.reserved))
        await self._engines.release()

    async def _rows(self) -> dict[str, dict[str, Any]]:
        return {row["url"]: row for row in await self._gateway.list_engines()}

    async def _reserve(self, rows: dict[str, dict[str, Any]]) -> None:
        """Take engines out of service until there are enough."""
        reserved = self._engines.reserved
        serving = [
            url
            for url, row in rows.items()
            if row["healthy"] and row["admitted"] and url not in reserved and self._engines.control(url)
        ]
        # An engine that left meanwhile is replaced by another.
        missing = max(0, self._number - len(reserved))
        taken = serving[1:][:missing]  # the first stays in service
        for url in taken:
            reserved.add(url)
            await self._gateway.admit_engine(url, False)
        await self._drain(taken)

    async def _drain(self, urls: Collection[str]) -> None:
        """Wait until the engines have no calls, at most DRAIN_S."""
        deadline = time.monotonic() + DRAIN_S
        while urls and time.monotonic() < deadline:
            rows = await self._rows()
            if not any(rows[url]["calls"] for url in urls if url in rows):
                return
            await asyncio.sleep(POLL_S)

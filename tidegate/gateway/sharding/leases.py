"""Aggregates leases over shards."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgpack

from tidegate.gateway.http.schemas import Lease
from tidegate.gateway.sharding.fleet import Answer, Fleet, Refused, first_completed
from tidegate.gateway.sharding.shard import shard_of_id

_ROUND_S = 5.0
"""Longest wait for a ready group in one call; an abandoned call ends with it."""


class LeaseAggregator:
    """Leases up to `max` groups from the shards in turn, starting with a different shard each time.

    Every shard learns the trainer's epoch before any group is leased. Groups of one shard come in the order
    of sealing; between shards there is no order.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._next_shard = 0

    async def lease(self, request: Lease, headers: Mapping[str, str]) -> list[dict[str, Any]]:
        """Lease groups and return their wire forms. Raises Refused, or GatewayError after a timeout."""
        deadline = asyncio.get_running_loop().time() + request.wait_s
        body = {"trainer_epoch": request.trainer_epoch, "key": request.key}
        held = await self._fleet.call_all("POST", "/groups/lease", {**body, "max": 0}, headers)
        groups = [group for answer in held for group in _groups(answer)]
        while not groups:
            leasing = asyncio.ensure_future(self._lease_round(body, request.max, headers))
            try:
                groups = await asyncio.shield(leasing)
            except asyncio.CancelledError:
                await self.release(await leasing)
                raise
            remaining = deadline - asyncio.get_running_loop().time()
            if groups or remaining <= 0:
                break
            wait = {"trainer_epoch": request.trainer_epoch, "wait_s": min(remaining, _ROUND_S)}
            await first_completed(
                *(
                    self._fleet.call(shard.index, "POST", "/groups/wait", wait, headers)
                    for shard in self._fleet.shards
                )
            )
        return groups

    async def _lease_round(
        self, body: dict[str, Any], max_groups: int, headers: Mapping[str, str]
    ) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = []
        shards = len(self._fleet.shards)
        self._next_shard += 1
        for step in range(shards):
            if len(groups) >= max_groups:
                break
            index = (self._next_shard + step) % shards
            wanted = {**body, "max": max_groups - len(groups)}
            answer = await self._fleet.call(index, "POST", "/groups/lease", wanted, headers)
            if answer.status >= 400:
                await self.release(groups)
                raise Refused(answer)
            groups += _groups(answer)
        return groups

    async def release(self, groups: list[dict[str, Any]]) -> None:
        """Release groups whose lease response was not delivered."""
        by_shard: dict[int, list[str]] = {}
        for group in groups:
            index = shard_of_id(group["lease_id"], len(self._fleet.shards))
            if index is not None:
                by_shard.setdefault(index, []).append(group["lease_id"])
        for index, lease_ids in by_shard.items():
            await self._fleet.call(index, "POST", "/groups/return", {"lease_ids": lease_ids})


def _groups(answer: Answer) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = msgpack.unpackb(answer.body)["groups"]
    return groups

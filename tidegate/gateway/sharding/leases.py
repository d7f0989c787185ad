"""Leases gathered over shards."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgpack

from tidegate.gateway.http.schemas import Lease
from tidegate.gateway.sharding.fleet import Answer, Fleet, Refused, first
from tidegate.gateway.sharding.shard import shard_of_id

_ROUND_S = 5.0
"""How long one wait for a ready group lasts; what nobody waits for any more ends with it."""


class LeaseAggregator:
    """Gathers up to `max` groups, from one shard after another, each time beginning with another one.

    Every shard learns of the trainer's epoch before any group is leased. Within a shard the earliest
    sealed group comes first; between shards there is no order.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._turn = 0

    async def lease(self, asked: Lease, headers: Mapping[str, str]) -> list[dict[str, Any]]:
        """The groups' wire forms. Raises Refused, or GatewayError where a shard does not answer."""
        deadline = asyncio.get_running_loop().time() + asked.wait_s
        body = {"trainer_epoch": asked.trainer_epoch, "key": asked.key}
        held = await self._fleet.ask_all("POST", "/groups/lease", {**body, "max": 0}, headers)
        groups = [group for answer in held for group in _groups(answer)]
        while not groups:
            passing = asyncio.ensure_future(self._pass(body, asked.max, headers))
            try:
                groups = await asyncio.shield(passing)
            except asyncio.CancelledError:
                await self.give_back(await passing)
                raise
            left = deadline - asyncio.get_running_loop().time()
            if groups or left <= 0:
                break
            wait = {"trainer_epoch": asked.trainer_epoch, "wait_s": min(left, _ROUND_S)}
            await first(
                *(
                    self._fleet.ask(shard.index, "POST", "/groups/wait", wait, headers)
                    for shard in self._fleet.shards
                )
            )
        return groups

    async def _pass(
        self, body: dict[str, Any], most: int, headers: Mapping[str, str]
    ) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = []
        shards = len(self._fleet.shards)
        self._turn += 1
        for step in range(shards):
            if len(groups) >= most:
                break
            index = (self._turn + step) % shards
            asked = {**body, "max": most - len(groups)}
            answer = await self._fleet.ask(index, "POST", "/groups/lease", asked, headers)
            if answer.status >= 400:
                await self.give_back(groups)
                raise Refused(answer)
            groups += _groups(answer)
        return groups

    async def give_back(self, groups: list[dict[str, Any]]) -> None:
        """What was leased for a trainer that has left is for the next one who asks."""
        by_shard: dict[int, list[str]] = {}
        for group in groups:
            index = shard_of_id(group["lease_id"], len(self._fleet.shards))
            if index is not None:
                by_shard.setdefault(index, []).append(group["lease_id"])
        for index, lease_ids in by_shard.items():
            await self._fleet.ask(index, "POST", "/groups/return", {"lease_ids": lease_ids})


def _groups(answer: Answer) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = msgpack.unpackb(answer.body)["groups"]
    return groups

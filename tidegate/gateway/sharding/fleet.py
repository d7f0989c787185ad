"""Starts and supervises all shards, calls one or all of them, and leases groups from them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from yarl import URL

from tidegate.errors import GatewayError, TidegateError
from tidegate.gateway.http.schemas import Lease
from tidegate.gateway.sharding.shard import Shard, shard_of_id
from tidegate.service import exact
from tidegate.service.http_client import DelayTolerantConnector, HttpClient, bearer

log = logging.getLogger("tidegate.gateway.sharding.shard")

CALL_S = 120.0
"""Timeout of a control call, which may have to wait for a reward and for a restart of the shard."""
_RETRY_S = 0.05
_ROUND_S = 5.0
"""Longest wait for a ready group in one call; an abandoned call ends with it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A shard's response."""

    status: int
    body: bytes
    content_type: str = "application/json"

    def json(self) -> Any:
        return exact.loads(self.body)


class Fleet(HttpClient):
    """Owns the shards and the connections to them, on one event loop."""

    def __init__(
        self, shards: Sequence[Shard], admin_key: str | None, on_failure: Callable[[str], None]
    ) -> None:
        super().__init__()
        self.shards = list(shards)
        self.engines: dict[str, dict[str, Any]] = {}
        """Engines added by clients, by URL; sent to a shard after a restart."""
        self._admin = bearer(admin_key)
        self._on_failure = on_failure
        self._supervisors: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start all shards and their supervisors. Raises StartError if a shard does not start."""
        results = await asyncio.gather(*(shard.start() for shard in self.shards), return_exceptions=True)
        for error in results:
            if error is not None:
                await self.close()
                raise error
        for shard in self.shards:
            supervisor = asyncio.create_task(
                shard.supervise(self._prepare), name=f"supervisor of shard {shard.index}"
            )
            supervisor.add_done_callback(self._supervisor_ended)
            self._supervisors.append(supervisor)

    def _connect(self) -> aiohttp.ClientSession:
        connector = DelayTolerantConnector(self._connect_s, keepalive_s=30.0)
        timeout = aiohttp.ClientTimeout(total=None)
        return aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)

    async def close(self) -> None:
        for supervisor in self._supervisors:
            supervisor.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        await asyncio.gather(*(shard.stop() for shard in self.shards))
        await super().close()

    async def call(
        self, index: int, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Send a control call to one shard, retrying until it is reachable: control calls are idempotent.

        `body` is sent as is if it is bytes, else as JSON. Without `headers` the admin key is sent. Raises
        GatewayError if the shard does not answer in time.
        """
        shard = self.shards[index]
        try:
            async with asyncio.timeout(CALL_S):
                while True:
                    await shard.up.wait()
                    try:
                        return await self._once(shard, method, path, body, headers)
                    except (aiohttp.ClientError, OSError) as error:
                        log.info("shard %d, %s %s: %s; retrying", index, method, path, error)
                        await asyncio.sleep(_RETRY_S)
        except TimeoutError:
            raise GatewayError(f"shard {index} did not answer within {CALL_S:g} s", status=503) from None

    async def call_all(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> list[Answer]:
        """Send the same call to every shard; returns the responses in shard order. Raises the first
        GatewayError, or Refused."""
        return raise_for_status(await self.call_each(method, path, body, headers))

    async def call_each(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> list[Answer | BaseException]:
        """Send the same call to every shard; returns each response or exception."""
        calls = [self.call(shard.index, method, path, body, headers) for shard in self.shards]
        # An error of one call must not leave the others running: a repetition would overlap with them.
        return await asyncio.gather(*calls, return_exceptions=True)

    async def first_answer(self, method: str, path: str, body: Any, headers: Mapping[str, str]) -> None:
        """Send the same call to every shard, wait for the first answer and cancel the other calls."""
        calls = [
            asyncio.ensure_future(self.call(shard.index, method, path, body, headers))
            for shard in self.shards
        ]
        try:
            await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    async def _once(
        self, shard: Shard, method: str, path: str, body: Any, headers: Mapping[str, str] | None
    ) -> Answer:
        data = body if body is None or isinstance(body, bytes) else exact.dumps(body)
        sent = {**(self._admin if headers is None else headers), "Content-Type": "application/json"}
        url = URL(shard.url + path, encoded=True)
        async with self.http.request(method, url, data=data, headers=sent) as response:
            return Answer(response.status, await response.read(), response.content_type)

    async def _prepare(self, shard: Shard) -> None:
        """Register the engines with a restarted shard."""
        for engine in list(self.engines.values()):
            try:
                await self._once(shard, "POST", "/engines", engine, None)
            except (aiohttp.ClientError, OSError) as error:  # the supervisor restarts it again
                log.warning("cannot register engine with shard %d: %s: %s", shard.index, engine["url"], error)

    def _supervisor_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(
                str(error) if isinstance(error, TidegateError) else f"{task.get_name()}: {error!r}"
            )


class Refused(GatewayError):
    """A shard refused a call; its response is forwarded unchanged."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.body.decode(errors="replace"), status=answer.status)
        self.answer = answer


def raise_for_status(answers: Sequence[Answer | BaseException]) -> list[Answer]:
    """Return all responses, or raise the first exception; an HTTP error raises Refused."""
    responses = []
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
        if answer.status >= 400:
            raise Refused(answer)
        responses.append(answer)
    return responses


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
        # A lease of 0 groups returns those that this key holds: the response of the first request was lost.
        held = await self._fleet.call_all("POST", "/groups/lease", {**body, "max": 0}, headers)
        groups = [group for answer in held for group in _groups(answer)]
        while not groups:
            leasing = asyncio.ensure_future(self._lease_round(body, request.max, headers))
            try:
                # A round that was cut off would leave groups leased that nobody knows of.
                groups = await asyncio.shield(leasing)
            except asyncio.CancelledError:
                await self.release(await leasing)
                raise
            remaining = deadline - asyncio.get_running_loop().time()
            if groups or remaining <= 0:
                break
            wait = {"trainer_epoch": request.trainer_epoch, "wait_s": min(remaining, _ROUND_S)}
            await self._fleet.first_answer("POST", "/groups/wait", wait, headers)
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
    groups: list[dict[str, Any]] = exact.unpack(answer.body)["groups"]
    return groups

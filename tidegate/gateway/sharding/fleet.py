"""Starts and supervises all shards, and calls one or all of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
from yarl import URL

from tidegate.errors import GatewayError, TidegateError
from tidegate.gateway.engines.client import DelayTolerantConnector
from tidegate.gateway.sharding.shard import Shard

log = logging.getLogger("tidegate.gateway.sharding.shard")

CALL_S = 120.0
"""Timeout of a control call, which may have to wait for a reward and for a restart of the shard."""
_RETRY_S = 0.05


@dataclass(frozen=True, slots=True)
class Answer:
    """A shard's response."""

    status: int
    body: bytes
    content_type: str = "application/json"

    def json(self) -> Any:
        return orjson.loads(self.body)


class Fleet:
    """Owns the shards and the connections to them, on one event loop."""

    def __init__(
        self, shards: Sequence[Shard], admin_key: str | None, on_failure: Callable[[str], None]
    ) -> None:
        self.shards = list(shards)
        self.engines: dict[str, dict[str, Any]] = {}
        """Engines added by clients, by URL; sent to a shard after a restart."""
        self._admin = {} if admin_key is None else {"Authorization": f"Bearer {admin_key}"}
        self._on_failure = on_failure
        self._supervisors: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start all shards and their supervisors. Raises StartError if a shard does not start."""
        connector = DelayTolerantConnector(5.0, keepalive_s=30.0)
        timeout = aiohttp.ClientTimeout(total=None)
        self.http = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
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

    async def close(self) -> None:
        for supervisor in self._supervisors:
            supervisor.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        await asyncio.gather(*(shard.stop() for shard in self.shards))
        await self.http.close()

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
        return await asyncio.gather(*calls, return_exceptions=True)

    async def _once(
        self, shard: Shard, method: str, path: str, body: Any, headers: Mapping[str, str] | None
    ) -> Answer:
        data = body if body is None or isinstance(body, bytes) else orjson.dumps(body)
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


async def first_completed(*work: Coroutine[Any, Any, Any]) -> None:
    """Wait until the first coroutine is done and cancel the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

"""All shards together: started, kept, asked one by one or all at once."""

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
from tidegate.gateway.engines.lag import PatientConnector
from tidegate.gateway.sharding.shard import Shard

log = logging.getLogger("tidegate.gateway.sharding.shard")

CALL_S = 120.0
"""How long a control call waits for a shard: a finish waits for its reward, and a shard may restart."""
_AGAIN_S = 0.05


@dataclass(frozen=True, slots=True)
class Answer:
    """What a shard answered."""

    status: int
    body: bytes
    content_type: str = "application/json"

    def json(self) -> Any:
        return orjson.loads(self.body)


class Fleet:
    """Owns the shards and the connections to them; lives on one event loop."""

    def __init__(
        self, shards: Sequence[Shard], admin_key: str | None, on_death: Callable[[str], None]
    ) -> None:
        self.shards = list(shards)
        self.engines: dict[str, dict[str, Any]] = {}
        """What was added, by URL: a shard that starts again is told."""
        self._admin = {} if admin_key is None else {"Authorization": f"Bearer {admin_key}"}
        self._on_death = on_death
        self._keepers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Raises StartError where a shard does not come up."""
        connector = PatientConnector(5.0, keepalive_s=30.0)
        timeout = aiohttp.ClientTimeout(total=None)
        self.http = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        results = await asyncio.gather(*(shard.start() for shard in self.shards), return_exceptions=True)
        for error in results:
            if error is not None:
                await self.close()
                raise error
        for shard in self.shards:
            keeper = asyncio.create_task(shard.keep(self._prepare), name=f"keeper of shard {shard.index}")
            keeper.add_done_callback(self._keeper_ended)
            self._keepers.append(keeper)

    async def close(self) -> None:
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(shard.stop() for shard in self.shards))
        await self.http.close()

    async def ask(
        self, index: int, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """One control call to one shard, repeated while the shard cannot be reached: all of them may be.

        `body`: bytes as they came, or what is to become JSON. Without `headers` it has the front's own
        right. Raises GatewayError where the shard does not answer in time.
        """
        shard = self.shards[index]
        try:
            async with asyncio.timeout(CALL_S):
                while True:
                    await shard.up.wait()
                    try:
                        return await self._once(shard, method, path, body, headers)
                    except (aiohttp.ClientError, OSError) as error:
                        log.info("shard %d, %s %s: %s; once more", index, method, path, error)
                        await asyncio.sleep(_AGAIN_S)
        except TimeoutError:
            raise GatewayError(f"shard {index} did not answer within {CALL_S:g} s", status=503) from None

    async def ask_all(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> list[Answer]:
        """The same call to every shard; the answers are in the shards' order. Raises GatewayError, with
        the first refusal among them."""
        return checked(await self.ask_each(method, path, body, headers))

    async def ask_each(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> list[Answer | BaseException]:
        """The same, with what each shard answered, or why it did not."""
        asked = [self.ask(shard.index, method, path, body, headers) for shard in self.shards]
        return await asyncio.gather(*asked, return_exceptions=True)

    async def _once(
        self, shard: Shard, method: str, path: str, body: Any, headers: Mapping[str, str] | None
    ) -> Answer:
        data = body if body is None or isinstance(body, bytes) else orjson.dumps(body)
        sent = {**(self._admin if headers is None else headers), "Content-Type": "application/json"}
        url = URL(shard.url + path, encoded=True)
        async with self.http.request(method, url, data=data, headers=sent) as response:
            return Answer(response.status, await response.read(), response.content_type)

    async def _prepare(self, shard: Shard) -> None:
        """A shard that was started again has to know the engines."""
        for engine in list(self.engines.values()):
            try:
                await self._once(shard, "POST", "/engines", engine, None)
            except (aiohttp.ClientError, OSError) as error:  # it died again, which its keeper sees
                log.warning("shard %d could not be told of %s: %s", shard.index, engine["url"], error)

    def _keeper_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_death(
                str(error) if isinstance(error, TidegateError) else f"{task.get_name()}: {error!r}"
            )


class Refused(GatewayError):
    """A shard refused a call; its answer is passed on as it is."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.body.decode(errors="replace"), status=answer.status)
        self.answer = answer


def checked(answers: Sequence[Answer | BaseException]) -> list[Answer]:
    """All of them, or the first that is none raised: a refusal as Refused."""
    found = []
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
        if answer.status >= 400:
            raise Refused(answer)
        found.append(answer)
    return found


async def first(*work: Coroutine[Any, Any, Any]) -> None:
    """Until the first of them is done; the others are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

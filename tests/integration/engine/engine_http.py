"""The real engine on a real socket, in the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp

from tests.serving import served
from tidegate.engine.engine import Engine
from tidegate.engine.server.server import create_app

DEADLINE_S = 30.0


class Client:
    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self.url = url
        self.http = http

    async def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        async with self.http.post(self.url + path, json={} if body is None else body) as reply:
            return reply.status, await reply.json()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(self.url + path) as reply:
            return reply.status, await reply.json()

    async def generate(self, prompt: list[int], rid: str | None = None, **params: Any) -> Any:
        body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True, "rid": rid}
        status, reply = await self.post("/generate", body)
        assert status == 200, reply
        return reply

    async def stream(
        self, prompt: list[int], rid: str | None = None, listed: int = 0, **params: Any
    ) -> AsyncIterator[Any]:
        body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True, "rid": rid}
        body |= {"top_logprobs_num": listed} if listed else {}
        async with self.http.post(self.url + "/generate", json={**body, "stream": True}) as reply:
            assert reply.status == 200
            assert reply.content_type == "text/event-stream"
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])
                elif line.startswith(b"data: "):
                    assert line == b"data: [DONE]\n"
                    return
        raise AssertionError("the stream ended without [DONE]")

    async def info(self) -> Any:
        return (await self.get("/model_info"))[1]

    async def until(self, holds: Callable[[Any], bool]) -> Any:
        """Poll `/model_info` until it holds."""
        async with asyncio.timeout(DEADLINE_S):
            while not holds(info := await self.info()):  # noqa: ASYNC110 - the server's state
                await asyncio.sleep(0.005)
        return info


@contextlib.asynccontextmanager
async def serving(engine: Engine) -> AsyncIterator[Client]:
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with served(create_app(engine)) as url, aiohttp.ClientSession(timeout=timeout) as http:
        yield Client(url, http)

"""Offers attempts to an agents' process without a gateway, for agents that call another endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from tidegate.service.service import LOOPBACK
from tidegate.trainer.processes.provider import GatewayAccess

Report = asyncio.Future[dict[str, Any]]
MAX_BODY = 64 * 1024 * 1024
LATE_S = 3.0
"""Seconds after its deadline in which an attempt may still be reported, as at a gateway."""


class AttemptServer:
    """Serves the calls of workers (docs/remote.md) to the one process that an evaluation starts."""

    def __init__(self) -> None:
        self._key = secrets.token_urlsafe(24)
        self._queue: asyncio.Queue[tuple[dict[str, Any], Report]] = asyncio.Queue()
        self._taken: dict[str, Report] = {}
        """Reports of the attempts that the process has taken."""
        self._left: set[str] = set()
        """Names of the processes that have exited; a poll of theirs may still be waiting."""
        self._returned = 0

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[GatewayAccess]:
        """Serve the calls while the context is open."""
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_post("/attempts/next", self._next)
        app.router.add_post("/attempts/leave", self._give_back)
        app.router.add_post("/s/{attempt}/finish", self._finish)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, LOOPBACK, 0).start()
            yield GatewayAccess(f"http://{LOOPBACK}:{runner.addresses[0][1]}", self._key)
        finally:
            await runner.cleanup()

    async def run(self, attempt: dict[str, Any]) -> dict[str, Any]:
        """Have an attempt run; returns the report of its end."""
        ended: Report = asyncio.get_running_loop().create_future()
        name = secrets.token_hex(12)
        # The process alone gets this key; agents do not.
        row = {**attempt, "attempt": name, "finish_key": self._key, "heartbeat_s": 0.0}
        self._queue.put_nowait((row, ended))
        try:
            return await ended
        finally:
            self._taken.pop(name, None)

    async def leave(self, worker: str) -> int:
        """End the attempts of the process, which has exited; returns how many of its agents returned."""
        self._left.add(worker)
        for ended in self._taken.values():
            _end(ended, "cancelled", "the agents' process exited")
        returned, self._returned = self._returned, 0
        return returned

    async def takes_attempts(self, _: str) -> bool:
        """The attempts that it took have deadlines."""
        return True

    async def _next(self, request: web.Request) -> web.Response:
        poll = await self._body(request)
        offers: list[tuple[dict[str, Any], Report]] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(poll["wait_s"]):
                offers.append(await self._queue.get())
        while offers and len(offers) < poll["capacity"] and not self._queue.empty():
            offers.append(self._queue.get_nowait())
        if poll["worker"] in self._left:
            for offer in offers:
                self._queue.put_nowait(offer)
            raise web.HTTPGone
        for row, ended in offers:
            self._taken[row["attempt"]] = ended
            why = "the agent did not return before its deadline"
            asyncio.get_running_loop().call_later(row["deadline_s"] + LATE_S, _end, ended, "timeout", why)
        return web.json_response({"attempts": [row for row, _ in offers]})

    async def _finish(self, request: web.Request) -> web.Response:
        report = await self._body(request)
        ended = self._taken.get(request.match_info["attempt"])
        if ended is not None and not ended.done():
            self._returned += report["outcome"] is None
            ended.set_result(report)
        return web.json_response({})

    async def _give_back(self, request: web.Request) -> web.Response:
        await self.leave((await self._body(request))["worker"])
        return web.json_response({})

    async def _body(self, request: web.Request) -> dict[str, Any]:
        given = request.headers.get("Authorization", "").encode("utf-8", "replace")
        if not secrets.compare_digest(given, f"Bearer {self._key}".encode()):
            raise web.HTTPUnauthorized
        body: dict[str, Any] = await request.json()
        return body


def _end(ended: Report, outcome: str, error: str) -> None:
    if not ended.done():
        ended.set_result({"outcome": outcome, "error": error})

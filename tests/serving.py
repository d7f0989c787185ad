"""An ASGI app on uvicorn, in the test's own event loop, that comes and goes without a pause."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn

from tests.waiting import eventually

START_S = 30.0
GRACE_S = 1.0


class _Server(uvicorn.Server):
    """uvicorn looks ten times a second whether it is to end, and then waits a tenth of a second more,
    whether or not there is somebody to wait for: as long as many a test takes."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()
        self.stop = asyncio.Event()

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.stop.wait()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        finally:
            self.up.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        try:
            await eventually(lambda: not (state.connections or state.tasks), GRACE_S)
        except TimeoutError:
            for task in state.tasks:
                task.cancel()
        await self.lifespan.shutdown()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def served(app: Any, port: int = 0) -> AsyncIterator[str]:
    """Its URL. The app has answered what was asked, or was cancelled a second later, when this ends."""
    sock = socket.create_server(("127.0.0.1", port))
    server = _Server(uvicorn.Config(app, log_level="warning", access_log=False))
    task = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        async with asyncio.timeout(START_S):
            await server.up.wait()
        assert server.started, "the app did not start"
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.stop.set()
        await task
        sock.close()

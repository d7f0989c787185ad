"""An ASGI app on uvicorn in the test's event loop, with fast start and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn

from tests.waiting import eventually
from tidegate.service.bounds import BoundedProtocol

START_S = 30.0
GRACE_S = 1.0


class _Server(uvicorn.Server):
    """A server without polling: uvicorn checks for shutdown ten times per second and then waits another tenth
    of a second, even without open connections, which is as long as many tests take."""

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
    """Serves the app; yields its URL. At the end, open requests have GRACE_S to finish."""
    sock = socket.create_server(("127.0.0.1", port))
    server = _Server(uvicorn.Config(app, http=BoundedProtocol, log_level="warning", access_log=False))
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

"""A gateway in a separate process, which is restarted on its port whenever it is killed.

The processes are forked from one that has imported all modules, so that a start is fast. The test process
holds the listening socket, as a run does.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import socket
from collections.abc import AsyncIterator
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from tests.fakes import eventually
from tidegate import failpoints
from tidegate.gateway.client import GatewayClient
from tidegate.gateway.server import GatewayOptions, serve
from tidegate.service.serve import Listen, bind

KEY = "admin"
DIES_S = 20.0


class GatewayProcess:
    """The gateway process, made by `running`; `deaths` counts its exits, `client` is the trainer's client."""

    def __init__(self, options: GatewayOptions, announce: Path, client: GatewayClient, sock: socket.socket):
        self.options = options
        self.client = client
        self.deaths = 0
        self._announce = announce
        self._socket = sock
        self._context = _context()
        self._process: ForkServerProcess | None = None

    @property
    def url(self) -> str:
        return self.client.url

    def start(self, failpoint: str = "") -> None:
        self._announce.unlink(missing_ok=True)
        arguments = (self.options, self._socket, self._announce, failpoint)
        self._process = self._context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()

    def kill(self) -> None:
        if self._process is not None and self._process.pid is not None:
            os.kill(self._process.pid, signal.SIGKILL)

    async def keep(self) -> None:
        """Restarts the process whenever it is killed; any other exit is an error."""
        while True:
            await eventually(lambda: self._process is None or not self._process.is_alive(), 600)
            assert self._process is not None
            assert self._process.exitcode == -signal.SIGKILL, f"exit code {self._process.exitcode}"
            self.deaths += 1
            self.start()

    async def until_died(self, deaths: int) -> None:
        await eventually(lambda: self.deaths >= deaths, DIES_S)

    async def until_up(self) -> None:
        await eventually(self._announce.exists, DIES_S)

    async def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.join)


@contextlib.asynccontextmanager
async def running(
    model: Path, folder: Path, failpoint: str = "", **options: Any
) -> AsyncIterator[GatewayProcess]:
    """Runs a gateway with a journal in `folder`; its first process is killed at `failpoint`."""
    made = GatewayOptions(model=model, admin_key=KEY, journal=folder / "journal", **options)
    with bind(Listen()) as sock:
        sock.listen(100)
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        async with GatewayClient(url, KEY) as client:
            gateway = GatewayProcess(made, folder / "gateway.json", client, sock)
            gateway.start(failpoint)
            keeper = asyncio.create_task(gateway.keep())
            try:
                yield gateway
                assert not keeper.done(), keeper.exception()
            finally:
                keeper.cancel()
                await asyncio.gather(keeper, return_exceptions=True)
                await gateway.end()


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.gateway_process", "tests.environments_http"])
    return context


def _serve(options: GatewayOptions, sock: socket.socket, announce: Path, failpoint: str) -> None:
    os.environ[failpoints.VARIABLE] = failpoint
    serve(options, Listen(announce=announce, fd=sock.detach()))

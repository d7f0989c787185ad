"""Third-party servers, in Python environments of their own, that a Tidegate process starts and owns."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from pathlib import Path

import aiohttp

from tidegate.service.service import LOOPBACK, Service

READY_S = 1800.0
"""Timeout of a start, which may load large weights and capture CUDA graphs."""
POLL_S = 0.5
HEALTH_TIMEOUT_S = 5.0

PYTHON_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


class ExternalService(Service):
    """A third-party server. It is ready when `/health` returns 200, and is ended with its owner."""

    ready_s = READY_S
    poll_s = POLL_S

    def __init__(
        self, directory: Path, name: str, *, shares_log: bool = False, address: str = LOOPBACK
    ) -> None:
        super().__init__(name, list, directory, shares_log=shares_log)
        self.address = address
        self._group: int | None = None

    async def start(self) -> str:
        try:
            return await super().start()
        finally:
            self._group = self.pid

    async def wait_for_exit(self) -> str:
        how = await super().wait_for_exit()
        self._end_group()
        return how

    async def stop(self) -> None:
        await super().stop()
        self._end_group()

    def _end_group(self) -> None:
        """Kill the server's remaining workers, which a killed server cannot stop."""
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)

    def program(self, port: int) -> list[str]:
        """Return the command of this start; the server must listen on `address` and `port`."""
        raise NotImplementedError

    def command(self) -> list[str]:
        self._port = self._port or free_port(self.address)
        return [
            sys.executable,
            "-m",
            "tidegate.service.parent_death",
            str(os.getpid()),
            *self.program(self._port),
        ]

    def environment(self) -> dict[str, str]:
        """Return this process's environment without variables that point to its own Python packages."""
        return {key: value for key, value in os.environ.items() if key not in PYTHON_VARIABLES}

    async def probe_url(self) -> str | None:
        url = f"http://{self.address}:{self._port}"
        timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as http, http.get(url + "/health") as reply:
                return url if reply.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None


def free_port(address: str = LOOPBACK) -> int:
    with socket.socket() as sock:
        sock.bind((address, 0))
        port: int = sock.getsockname()[1]
        return port

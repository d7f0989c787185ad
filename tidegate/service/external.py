"""Servers of other projects, from environments of their own, that a process of ours starts and owns."""

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
"""Large weights, and CUDA graphs to capture."""
POLL_S = 0.5
ANSWER_S = 5.0

NOT_THEIRS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


class ExternalService(Service):
    """A program that knows nothing of us: it is ready when its `/health` says 200, and ends with its owner,
    also when that is killed."""

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

    async def died(self) -> str:
        how = await super().died()
        self._end_group()
        return how

    async def stop(self) -> None:
        await super().stop()
        self._end_group()

    def _end_group(self) -> None:
        """End what it started and left behind: a server that is killed cannot end its workers."""
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)

    def program(self, port: int) -> list[str]:
        """The program and its arguments at this start; it listens on `address`."""
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
        """This process's, less what would lead another interpreter to this one's packages."""
        return {key: value for key, value in os.environ.items() if key not in NOT_THEIRS}

    async def where(self) -> str | None:
        url = f"http://{self.address}:{self._port}"
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as http, http.get(url + "/health") as answer:
                return url if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None


def free_port(address: str = LOOPBACK) -> int:
    with socket.socket() as sock:
        sock.bind((address, 0))
        port: int = sock.getsockname()[1]
        return port

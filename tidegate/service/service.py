"""Server processes that another process starts and owns, each with a log and an announced address.

A service is *ready* when it has announced its URL. It exits when its owner exits or is killed, since its
stdin closes then.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from tidegate.errors import StartError
from tidegate.service.process import OwnedProcess
from tidegate.service.process_secrets import send_secrets
from tidegate.service.serve import Listen, bind

LOOPBACK = "127.0.0.1"
READY_S = 120.0
STOP_S = 8.0
POLL_S = 0.05
EXTERNAL_READY_S = 1800.0
"""Timeout of a third-party server's start, which may load large weights and capture CUDA graphs."""
EXTERNAL_POLL_S = 0.5
HEALTH_TIMEOUT_S = 5.0
PYTHON_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


class Service(OwnedProcess):
    """One owned server process: `tidegate <verb> …`.

    Subclasses for other kinds of servers override `command` and `probe_url`.

    Args:
        verb: subcommand of `tidegate`.
        arguments: called at each start, so that a restarted engine gets the current weights.
        directory: holds the log and the announced address, in `logs/`.
        port: 0 takes a free one; a restart keeps it.
        secrets: passed through an inherited socket, as other processes can read command lines.
        name: distinguishes several services of one verb.
        shares_log: log to the owner's output instead of a file.
        host: the owner itself listens here, so that calls during a restart wait instead of being refused.
    """

    poll_s = POLL_S
    listens = True
    """Whether it has an address; otherwise its `url` is what it announces."""

    def __init__(
        self,
        verb: str,
        arguments: Callable[[], Sequence[str]],
        directory: Path,
        *,
        port: int = 0,
        secrets: Mapping[str, Any] | None = None,
        name: str | None = None,
        shares_log: bool = False,
        host: str | None = None,
        ready_s: float = READY_S,
    ) -> None:
        self.name = name or verb
        log = None if shares_log else directory / "logs" / f"{self.name}.log"
        super().__init__(f"the {self.name}", log)
        self.verb = verb
        self.restarts = 0
        self.url = ""
        self._port = port
        self._arguments = arguments
        self._secrets = dict(secrets or {})
        self._announce = directory / "logs" / f"{self.name}.address"
        self._host = host
        self.ready_s = ready_s
        self.variables: dict[str, str] = {}
        """Environment variables that the process gets besides the owner's."""
        self._socket: socket.socket | None = None

    async def start(self) -> str:
        """Start the process and wait until it is ready; returns its URL.

        Raises StartError if it exits, with the last line of its log, or if it takes longer than `ready_s`.
        """
        if self._host is not None and self._socket is None:
            self._socket = bind(Listen(self._host, self._port), f"{self.verb}.port")
        command, inherited = self.command(), []
        with contextlib.ExitStack() as stack:
            if self._socket is not None:
                inherited.append(self._socket.fileno())
                command += ["--fd", str(inherited[-1])]
            ours = None
            if self._secrets:
                ours, theirs = socket.socketpair()
                inherited.append(stack.enter_context(theirs).fileno())
                command += ["--secrets-fd", str(inherited[-1])]
            pipe = asyncio.subprocess.PIPE
            await self._spawn(
                command, stdin=pipe, pass_fds=inherited, env=self.environment() | self.variables
            )
        if ours is not None:
            await send_secrets(ours, self._secrets, self.ready_s)
        self.url = await self._ready()
        if self.listens:
            self._port = int(self.url.rpartition(":")[2])  # a restart keeps the address
        return self.url

    def command(self) -> list[str]:
        self._announce.parent.mkdir(parents=True, exist_ok=True)
        self._announce.unlink(missing_ok=True)
        port = ["--port", str(self._port)] if self.listens and self._socket is None else []
        return [
            sys.executable, "-P", "-m", "tidegate", self.verb, *self._arguments(), *port,
            "--announce", str(self._announce), "--owned",
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    async def probe_url(self) -> str | None:
        """Return the URL if the service is ready, else None."""
        if not self._announce.exists():
            return None
        url: str = json.loads(self._announce.read_text())["url"]
        return url

    async def _ready(self) -> str:
        assert self._process is not None
        deadline = time.monotonic() + self.ready_s
        while (url := await self.probe_url()) is None:
            if self._process.returncode is not None:
                raise StartError(f"the {self.name} did not start: {self.last_log_line()}")
            if time.monotonic() > deadline:
                late = self.not_ready(self.ready_s)
                await self.stop()
                raise StartError(late)
            await asyncio.sleep(self.poll_s)
        return url

    async def restart(self) -> None:
        self.restarts += 1
        await self.start()

    async def stop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self.signal(signal.SIGTERM)
        await self._join(STOP_S)


class ExternalService(Service):
    """A third-party server, in a Python environment of its own. It is ready when `/health` returns 200."""

    poll_s = EXTERNAL_POLL_S

    def __init__(
        self, directory: Path, name: str, *, shares_log: bool = False, address: str = LOOPBACK
    ) -> None:
        super().__init__(name, list, directory, shares_log=shares_log, ready_s=EXTERNAL_READY_S)
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
        tie = [sys.executable, "-P", "-m", "tidegate.service.parent_death", str(os.getpid())]
        return tie + self.program(self._port)

    def environment(self) -> dict[str, str]:
        own = {key: value for key, value in os.environ.items() if key not in PYTHON_VARIABLES}
        return {**own, "PYTHONSAFEPATH": "1"}  # as -P, which a Python before 3.11 does not have

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

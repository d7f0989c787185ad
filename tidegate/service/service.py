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

from tidegate.errors import StartError
from tidegate.service.process_secrets import send_secrets
from tidegate.service.serve import Listen, bind

LOOPBACK = "127.0.0.1"
READY_S = 120.0
STOP_S = 8.0
POLL_S = 0.05


class Service:
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

    ready_s = READY_S
    poll_s = POLL_S

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
    ) -> None:
        self.name = name or verb
        self.verb = verb
        self.restarts = 0
        self.url = ""
        self._port = port
        self._arguments = arguments
        self._secrets = dict(secrets or {})
        self._announce = directory / "logs" / f"{self.name}.address"
        self.log = directory / "logs" / f"{self.name}.log"
        self._shares_log = shares_log
        self._host = host
        self._socket: socket.socket | None = None
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> str:
        """Start the process and wait until it is ready; returns its URL.

        Raises StartError if it exits, with the last line of its log, or if it takes longer than `ready_s`.
        """
        if not self._shares_log:
            self.log.parent.mkdir(parents=True, exist_ok=True)
        if self._host is not None and self._socket is None:
            self._socket = bind(Listen(self._host, self._port))
        command, held = self.command(), []
        with contextlib.ExitStack() as stack:
            if self._socket is not None:
                held.append(self._socket.fileno())
                command += ["--fd", str(held[-1])]
            ours = None
            if self._secrets:
                ours, theirs = socket.socketpair()
                held.append(stack.enter_context(theirs).fileno())
                command += ["--secrets-fd", str(held[-1])]
            log = (
                None
                if self._shares_log
                else stack.enter_context(await asyncio.to_thread(self.log.open, "ab"))
            )
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=held,
                env=self.environment(),
                start_new_session=True,  # Ctrl-C in the terminal must reach the run only
            )
        if ours is not None:
            await send_secrets(ours, self._secrets, self.ready_s)
        self.url = await self._ready()
        self._port = int(self.url.rpartition(":")[2])  # a restart keeps the address
        return self.url

    def command(self) -> list[str]:
        """Return the command of this start."""
        self._announce.parent.mkdir(parents=True, exist_ok=True)
        self._announce.unlink(missing_ok=True)
        port = [] if self._socket is not None else ["--port", str(self._port)]
        return [
            sys.executable, "-m", "tidegate", self.verb, *self._arguments(), *port,
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
                await self.stop()
                raise StartError(f"the {self.name} was not ready after {self.ready_s:.0f} s; see {self.log}")
            await asyncio.sleep(self.poll_s)
        return url

    async def wait_for_exit(self) -> str:
        """Wait for the process to exit; returns a message on how it did."""
        assert self._process is not None
        code = await self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"the {self.name} {how}"

    async def restart(self) -> None:
        """Restart at the same address."""
        self.restarts += 1
        await self.start()

    async def stop(self) -> None:
        """Terminate the process; kill it if it does not exit within STOP_S."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        process = self._process
        if process is None or process.returncode is not None:
            return
        signal_child(process, signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), STOP_S)
        except TimeoutError:
            signal_child(process, signal.SIGKILL)
            await process.wait()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def last_log_line(self) -> str:
        """Return the last non-empty line of the log, and the log's path."""
        if self._shares_log:
            return "see the log"
        lines = self.log.read_text(errors="replace").strip().splitlines() if self.log.exists() else []
        return f"{lines[-1].strip()} (log: {self.log})" if lines else f"no output (log: {self.log})"


def signal_child(child: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Signal a child that may have exited.

    asyncio's `send_signal` would poll first and take the exit code away from asyncio's watcher.
    """
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, number)

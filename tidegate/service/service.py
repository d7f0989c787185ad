"""Server processes that another process starts and owns: each with its log and its announced address.

A service is told apart from a program that merely runs: it is *ready* when it has announced its URL.
It ends when its owner ends, also when that is killed (its stdin closes then).
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
from tidegate.service.secrecy import hand_over
from tidegate.service.serve import Listen, bind

LOOPBACK = "127.0.0.1"
READY_S = 120.0
STOP_S = 8.0
POLL_S = 0.05


class Service:
    """One owned server process: `tidegate <verb> …`.

    `port` 0 takes a free one. `arguments` is asked anew at each start, so that a restarted engine comes up
    at the current weights. `secrets` are passed through a socket that the process inherits, as command lines
    and environments can be read by others (`secrecy`).
    `name` tells several of one verb apart. Its log is a file in `directory`, or (`shares_log`) its owner's.
    With a `host` it is the owner that listens there: calls that come while the process is started again
    wait for it, and are not refused. Other kinds of servers override `command` and `where`.
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
        """Start the process and wait until it serves; returns its URL.

        Raises StartError with the end of its log where it dies or takes longer than `ready_s`.
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
                start_new_session=True,  # Ctrl-C in the terminal is for the run, which ends its services
            )
        if ours is not None:
            await hand_over(ours, self._secrets, self.ready_s)
        self.url = await self._ready()
        self._port = int(self.url.rpartition(":")[2])  # a restart comes up at the same address
        return self.url

    def command(self) -> list[str]:
        """What is run at this start."""
        self._announce.parent.mkdir(parents=True, exist_ok=True)
        self._announce.unlink(missing_ok=True)
        return [
            sys.executable, "-m", "tidegate", self.verb, *self._arguments(),
            "--port", str(self._port), "--announce", str(self._announce), "--owned",
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    async def where(self) -> str | None:
        """Its URL, once it serves."""
        if not self._announce.exists():
            return None
        url: str = json.loads(self._announce.read_text())["url"]
        return url

    async def _ready(self) -> str:
        assert self._process is not None
        deadline = time.monotonic() + self.ready_s
        while (url := await self.where()) is None:
            if self._process.returncode is not None:
                raise StartError(f"the {self.name} did not start: {self.last_words()}")
            if time.monotonic() > deadline:
                await self.stop()
                raise StartError(f"the {self.name} was not ready after {self.ready_s:.0f} s; see {self.log}")
            await asyncio.sleep(self.poll_s)
        return url

    async def died(self) -> str:
        """Wait for the process to end; returns how it ended, in words."""
        assert self._process is not None
        code = await self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"the {self.name} {how}"

    async def restart(self) -> None:
        """Start again on the same address."""
        self.restarts += 1
        await self.start()

    async def stop(self) -> None:
        """Ask it to end; kill it if it does not within STOP_S."""
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

    def last_words(self) -> str:
        """The last line of the log that says something."""
        if self._shares_log:
            return "the log says more"
        lines = self.log.read_text(errors="replace").strip().splitlines() if self.log.exists() else []
        return f"{lines[-1].strip()} (log: {self.log})" if lines else f"it said nothing (log: {self.log})"


def signal_child(child: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Signal a child that may have ended already.

    Not `child.send_signal`: that polls first, and so takes the exit code from under asyncio's watcher.
    """
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, number)

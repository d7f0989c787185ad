"""Owns the process of a trainer rank other than 0."""

from __future__ import annotations

import asyncio
import os
import pickle
import select
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tidegate.errors import StartError
from tidegate.service.process import OwnedProcess

READY = b"ready\n"
"""First line on the process's standard output."""
READY_S = 120.0
STOP_S = 8.0
COLLECTIVE_TIMEOUT_S = 600.0
"""Timeout of collective operations, and of writing a message to a rank."""


class RankProcess(Protocol):
    """Process of a rank other than 0, on this node (`LocalRankProcess`) or on another."""

    rank: int

    async def start(self) -> None: ...
    def send(self, message: object) -> None: ...
    async def wait_for_exit(self) -> str: ...
    async def stop(self) -> None: ...


class LocalRankProcess(OwnedProcess):
    """A rank's process on this machine. Its log is `logs/trainer-<rank>.log`."""

    def __init__(self, rank: int, logs: Path, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> None:
        super().__init__(f"trainer rank {rank}", logs / f"trainer-{rank}.log")
        self.rank = rank
        self._timeout_s = timeout_s
        self._commands: int | None = None
        self._sending = threading.Lock()

    def command(self) -> Sequence[str]:
        """Return the command, which prints READY and then reads messages from standard input."""
        # -P: a file in the working directory must not take the place of a module.
        return (sys.executable, "-P", "-m", "tidegate.trainer.distributed.rank_main")

    async def start(self) -> None:
        """Start the process and wait until it reads messages. Raises StartError.

        The kernel ends it when this process exits: during a collective it does not read its standard input.
        """
        theirs, self._commands = os.pipe()
        # A blocking write of more than the pipe has room for would outlast the timeout.
        os.set_blocking(self._commands, False)
        wrapper = [sys.executable, "-P", "-m", "tidegate.service.parent_death", str(os.getpid())]
        try:
            process = await self._spawn(
                [*wrapper, *self.command()], stdin=theirs, stdout=asyncio.subprocess.PIPE
            )
        finally:
            # Only the process may hold this end: else its exit would not break the pipe.
            os.close(theirs)
        assert process.stdout is not None
        try:
            line = await asyncio.wait_for(process.stdout.readline(), READY_S)
        except TimeoutError:
            raise StartError(self.not_ready(READY_S)) from None
        if line != READY:
            raise StartError(await self.wait_for_exit())

    def send(self, message: object) -> None:
        """Send a message; raises BrokenPipeError after an exit, TimeoutError if the process reads nothing."""
        rest = memoryview(pickle.dumps(message))
        with self._sending:
            while rest:
                rest = rest[self._write(rest) :]

    def _write(self, data: memoryview) -> int:
        if self._commands is None:
            raise BrokenPipeError(f"trainer rank {self.rank} was stopped")
        poll = select.poll()
        poll.register(self._commands, select.POLLOUT)
        if not poll.poll(self._timeout_s * 1000):
            raise TimeoutError(
                f"trainer rank {self.rank} has read nothing for {self._timeout_s:g} s (log: {self.log})"
            )
        return os.write(self._commands, data)

    async def wait_for_exit(self) -> str:
        return f"{await super().wait_for_exit()}; last log line: {self.last_log_line()}"

    async def stop(self) -> None:
        """Close the process's input, and kill it if it does not exit within STOP_S."""
        await self._close_pipe()
        await self._join(STOP_S)

    async def _close_pipe(self) -> None:
        """Close the pipe. If a write into it blocks, kill the process first, which ends the write."""
        if not self._sending.acquire(blocking=False):
            self.signal(signal.SIGKILL)
            await asyncio.to_thread(self._sending.acquire)
        try:
            if self._commands is not None:
                os.close(self._commands)
            self._commands = None
        finally:
            self._sending.release()


def rank_processes(ranks: int, logs: Path) -> list[LocalRankProcess]:
    return [LocalRankProcess(rank, logs) for rank in range(1, ranks)]

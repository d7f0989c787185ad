"""The owner's side of a trainer rank other than the first: its process, from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import sys
from pathlib import Path
from typing import BinaryIO, Protocol

from tidegate.errors import StartError
from tidegate.services import signal_child

READY = b"ready\n"
"""What it says first, on its standard output."""
READY_S = 120.0
STOP_S = 8.0


class Following(Protocol):
    """A rank other than the first as its owner sees it; `Follower`, or one that sits on another node."""

    rank: int

    async def start(self) -> None: ...
    def tell(self, message: object) -> None: ...
    async def died(self) -> str: ...
    async def stop(self) -> None: ...


class Follower:
    """A process of this machine. Its log is `logs/trainer-<rank>.log`."""

    def __init__(self, rank: int, logs: Path) -> None:
        self.rank = rank
        self.log = logs / f"trainer-{rank}.log"
        self._commands: BinaryIO | None = None
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Returns when it is ready to be told. Raises StartError.

        It is ended by the kernel, too, when this process dies: in a collective it reads no input.
        """
        theirs, ours = os.pipe()
        self._commands = os.fdopen(ours, "wb")
        tether = [sys.executable, "-m", "tidegate.tether", str(os.getpid())]
        try:
            with await asyncio.to_thread(self.log.open, "ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *tether, sys.executable, "-m", "tidegate.trainer.follower",
                    stdin=theirs, stdout=asyncio.subprocess.PIPE, stderr=log, start_new_session=True,
                )  # fmt: skip
        finally:
            os.close(theirs)
        assert self._process.stdout is not None
        try:
            said = await asyncio.wait_for(self._process.stdout.readline(), READY_S)
        except TimeoutError:
            raise StartError(f"trainer rank {self.rank} was not ready after {READY_S:g} s") from None
        if said != READY:
            raise StartError(await self.died())

    def tell(self, message: object) -> None:
        """Raises BrokenPipeError where it is dead."""
        assert self._commands is not None
        pickle.dump(message, self._commands)
        self._commands.flush()

    async def died(self) -> str:
        """Wait for its end; returns how it ended, in words."""
        assert self._process is not None
        code = await self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        lines = self.log.read_text(errors="replace").strip().splitlines()
        words = f"; its last words: {lines[-1].strip()}" if lines and code > 0 else ""
        return f"trainer rank {self.rank} {how}{words} (log: {self.log})"

    async def stop(self) -> None:
        """Let it end by itself; kill it if it does not within STOP_S."""
        if self._commands is not None:
            with contextlib.suppress(BrokenPipeError):
                self._commands.close()
        if self._process is None:
            return
        try:
            await asyncio.wait_for(self._process.wait(), STOP_S)
        except TimeoutError:
            signal_child(self._process, signal.SIGKILL)
            await self._process.wait()


def followers(ranks: int, logs: Path) -> list[Follower]:
    """All but the first of so many ranks."""
    return [Follower(rank, logs) for rank in range(1, ranks)]

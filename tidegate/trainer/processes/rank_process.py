"""The owner's side of a trainer rank other than the first: its process, from its start to its end."""

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
from tidegate.service.service import signal_child

READY = b"ready\n"
"""What it says first, on its standard output."""
READY_S = 120.0
STOP_S = 8.0
PATIENCE_S = 600.0
"""How long a rank waits for another in the middle of a step, before it takes it for lost."""


class RankProcess(Protocol):
    """A rank other than the first as its owner sees it, on this node (`LocalRankProcess`) or another."""

    rank: int

    async def start(self) -> None: ...
    def tell(self, message: object) -> None: ...
    async def died(self) -> str: ...
    async def stop(self) -> None: ...


class LocalRankProcess:
    """A process of this machine. Its log is `logs/trainer-<rank>.log`."""

    def __init__(self, rank: int, logs: Path, patience_s: float = PATIENCE_S) -> None:
        self.rank = rank
        self.log = logs / f"trainer-{rank}.log"
        self._patience_s = patience_s
        self._commands: int | None = None
        self._telling = threading.Lock()
        self._process: asyncio.subprocess.Process | None = None

    def command(self) -> Sequence[str]:
        """What is run: something that says READY, and is told."""
        return (sys.executable, "-m", "tidegate.trainer.distributed.rank_main")

    async def start(self) -> None:
        """Returns when it is ready to be told. Raises StartError.

        It is ended by the kernel, too, when this process dies: in a collective it reads no input.
        """
        theirs, self._commands = os.pipe()
        os.set_blocking(self._commands, False)
        tether = [sys.executable, "-m", "tidegate.service.parent_death", str(os.getpid())]
        try:
            with await asyncio.to_thread(self.log.open, "ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *tether, *self.command(),
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
        """Raises BrokenPipeError where it is dead, TimeoutError where it reads nothing for `patience_s`."""
        left = memoryview(pickle.dumps(message))
        with self._telling:
            while left:
                left = left[self._write(left) :]

    def _write(self, left: memoryview) -> int:
        """As much as there is room for in the pipe: less than a batch takes; returns how many bytes."""
        if self._commands is None:
            raise BrokenPipeError(f"trainer rank {self.rank} was stopped")
        room = select.poll()
        room.register(self._commands, select.POLLOUT)
        if not room.poll(self._patience_s * 1000):
            raise TimeoutError(
                f"trainer rank {self.rank} has read nothing for {self._patience_s:g} s (log: {self.log})"
            )
        return os.write(self._commands, left)

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
        await self._hang_up()
        if self._process is None:
            return
        try:
            await asyncio.wait_for(self._process.wait(), STOP_S)
        except TimeoutError:
            signal_child(self._process, signal.SIGKILL)
            await self._process.wait()

    async def _hang_up(self) -> None:
        """Close the pipe, which is the end for who reads it. Where somebody still writes into it, nobody
        does: killed, it lets go of the other end, and of whoever writes."""
        if not self._telling.acquire(blocking=False):
            if self._process is not None:
                signal_child(self._process, signal.SIGKILL)
            await asyncio.to_thread(self._telling.acquire)
        try:
            if self._commands is not None:
                os.close(self._commands)
            self._commands = None
        finally:
            self._telling.release()


def rank_processes(ranks: int, logs: Path) -> list[LocalRankProcess]:
    """All but the first of so many ranks."""
    return [LocalRankProcess(rank, logs) for rank in range(1, ranks)]

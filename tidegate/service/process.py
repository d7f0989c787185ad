"""A child process that its owner starts, waits for and stops; its output goes to a log."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tidegate.errors import unwrapped

T = TypeVar("T")


class OwnedProcess:
    """Base of the owners of processes.

    Args:
        title: the process, as error messages name it.
        log: receives its standard error (and output, unless that is a pipe); None: the owner's own output.
    """

    def __init__(self, title: str, log: Path | None) -> None:
        self.title = title
        self.log = log
        self._process: asyncio.subprocess.Process | None = None

    async def _spawn(self, command: Sequence[str], **options: Any) -> asyncio.subprocess.Process:
        """Start the process; `options` are those of `asyncio.create_subprocess_exec`."""
        with contextlib.ExitStack() as stack:
            output = None
            if self.log is not None:
                self.log.parent.mkdir(parents=True, exist_ok=True)
                output = stack.enter_context(await asyncio.to_thread(self.log.open, "ab"))
            self._process = await asyncio.create_subprocess_exec(
                *command,
                **{"stdout": output, "stderr": output, **options},
                start_new_session=True,  # Ctrl-C in the terminal must reach the run only
            )
        return self._process

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def wait_for_exit(self) -> str:
        """Wait for the process to exit; returns a message on how it did."""
        assert self._process is not None
        code = await self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{self.title} {how}"

    def signal(self, number: signal.Signals) -> None:
        """Signal the process, which may have exited.

        asyncio's `send_signal` would poll first and take the exit code away from asyncio's watcher.
        """
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    async def _join(self, timeout_s: float) -> None:
        """Wait for the process to exit; kill it after `timeout_s`."""
        if self._process is None:
            return
        try:
            await asyncio.wait_for(self._process.wait(), timeout_s)
        except TimeoutError:
            self.signal(signal.SIGKILL)
            await self._process.wait()

    def last_log_line(self) -> str:
        """Return the last non-empty line of the log, and the log's path."""
        if self.log is None:
            return "see the log"
        lines = self.log.read_text(errors="replace").strip().splitlines() if self.log.exists() else []
        return f"{lines[-1].strip()} (log: {self.log})" if lines else f"no output (log: {self.log})"


async def run_together(jobs: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines at the same time; the first TidegateError cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(job) for job in jobs]
    except ExceptionGroup as failures:
        raise unwrapped(failures) from None
    return [task.result() for task in tasks]

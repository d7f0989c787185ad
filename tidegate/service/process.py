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

    def not_ready(self, seconds: float) -> str:
        """Returns a message on a start that takes too long, which tells a slow start from one that waits."""
        used = f", {used_s:.0f} s of them on a CPU" if (used_s := self._cpu_s()) is not None else ""
        return (
            f"{self.title} was not ready after {seconds:g} s{used}; {machine_load()}; {self.last_log_line()}"
        )

    def _cpu_s(self) -> float | None:
        """Returns the seconds of CPU time that the process has used; None without procfs."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text(errors="replace")
        except OSError:
            return None
        fields = stat.rpartition(")")[2].split()  # the name before may contain spaces
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

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


def machine_load() -> str:
    """Returns a text with the load of this machine, and whether it explains a slow start."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    text = f"the machine's load is {load:.1f} on {cores} CPU core{'s' if cores > 1 else ''}"
    return f"{text}: end other programs, or wait for them, and start again" if load > cores else text


async def run_together(jobs: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines at the same time; the first TidegateError cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(job) for job in jobs]
    except ExceptionGroup as failures:
        raise unwrapped(failures) from None
    return [task.result() for task in tasks]

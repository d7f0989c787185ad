"""Runs a main job beside background tasks; a failing task cancels the job."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tidegate.errors import NoProgressError

T = TypeVar("T")


@dataclass(slots=True)
class TaskSupervisor:
    """Owns background tasks. `run` ends with the job, or when a task fails.

    It may be created in a thread without an event loop, as a run on a Ray node is.
    """

    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    _failed: asyncio.Event = field(default_factory=asyncio.Event)
    _error: BaseException | None = None

    def watch(self, component: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run a background task. It may return; if it raises, the job is cancelled."""
        task = asyncio.create_task(component, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        # Later errors are often consequences of the first.
        self._error = self._error or error
        self._failed.set()

    async def run(self, job: Coroutine[Any, Any, T]) -> T:
        """Run the job and return its result; raises the error of the first failing task."""
        main = asyncio.create_task(job, name="main")
        failed = asyncio.create_task(self._failed.wait(), name="failure of a background task")
        try:
            await asyncio.wait((main, failed), return_when=asyncio.FIRST_COMPLETED)
            if self._error is not None:
                raise self._error
            return main.result()
        finally:
            main.cancel()
            failed.cancel()
            await asyncio.gather(main, failed, return_exceptions=True)

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def watchdog(
    limit_s: float, last_progress: Callable[[], float], describe: Callable[[], str], check_s: float = 2.0
) -> None:
    """Raises NoProgressError after `limit_s` without progress, with `describe()` in its message."""
    while True:
        # The interval of the checks must not exceed a short limit.
        await asyncio.sleep(min(check_s, limit_s / 4))
        idle = time.monotonic() - last_progress()
        if idle > limit_s:
            raise NoProgressError(
                f"no progress for {idle:.0f} s (the watchdog's limit is {limit_s:g} s); {describe()}"
            )


async def every(seconds: float, do: Callable[[], object]) -> None:
    while True:
        do()
        await asyncio.sleep(seconds)

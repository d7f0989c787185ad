"""Runs a main job beside background tasks; a failing task cancels the job."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tidegate.errors import StalledError

T = TypeVar("T")


@dataclass(slots=True)
class TaskSupervisor:
    """Owns background tasks. `run` ends with the job, or when a task fails.

    Must be created on a running event loop.
    """

    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    _failure: asyncio.Future[BaseException] = field(default_factory=asyncio.Future)

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
        if not self._failure.done():
            self._failure.set_result(error)

    async def run(self, job: Coroutine[Any, Any, T]) -> T:
        """Run the job and return its result; raises the error of the first failing task."""
        main = asyncio.create_task(job, name="main")
        try:
            futures: list[asyncio.Future[Any]] = [main, self._failure]
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                raise self._failure.result()
            return main.result()
        finally:
            main.cancel()
            await asyncio.gather(main, return_exceptions=True)

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def watchdog(
    limit_s: float, last_progress: Callable[[], float], describe: Callable[[], str], check_s: float = 2.0
) -> None:
    """Raises StalledError after `limit_s` without progress, with `describe()` in its message."""
    while True:
        await asyncio.sleep(min(check_s, limit_s / 4))
        idle = time.monotonic() - last_progress()
        if idle > limit_s:
            raise StalledError(
                f"no progress for {idle:.0f} s (the watchdog's limit is {limit_s:g} s); {describe()}"
            )


async def every(seconds: float, do: Callable[[], object]) -> None:
    while True:
        do()
        await asyncio.sleep(seconds)

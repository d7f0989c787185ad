"""A main job and the components it depends on: a component's death ends the job, and says why."""

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
    """Owns background tasks. `run` lasts as long as the job, or until a component fails.

    Made on a running event loop.
    """

    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    _failure: asyncio.Future[BaseException] = field(default_factory=asyncio.Future)

    def watch(self, component: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run a component. One that ends by itself is done; one that raises ends the job."""
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
        """The job's result; raises the first failing component's error, with the job cancelled."""
        main = asyncio.create_task(job, name="main")
        try:
            waited: list[asyncio.Future[Any]] = [main, self._failure]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                raise self._failure.result()
            return main.result()
        finally:
            main.cancel()
            await asyncio.gather(main, return_exceptions=True)

    async def close(self) -> None:
        """Cancel what still runs and wait for its end."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def watchdog(
    limit_s: float, last_progress: Callable[[], float], describe: Callable[[], str], check_s: float = 2.0
) -> None:
    """Raises StalledError when nothing moved for `limit_s`; `describe` says what is waited for."""
    while True:
        await asyncio.sleep(min(check_s, limit_s / 4))
        idle = time.monotonic() - last_progress()
        if idle > limit_s:
            raise StalledError(
                f"nothing moved for {idle:.0f} s (the watchdog's limit is {limit_s:g} s); {describe()}"
            )


async def every(seconds: float, do: Callable[[], object]) -> None:
    """Call `do` again and again."""
    while True:
        do()
        await asyncio.sleep(seconds)

"""Waits that end when the run is to stop, and waits that do not end before their work."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def wait_at_most(event: asyncio.Event, seconds: float) -> None:
    """Wait until the event is set, or the time is over."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


async def unless_stopped(stop: asyncio.Event, coroutine: Coroutine[Any, Any, T]) -> T | None:
    """Return the result; if `stop` is set first, cancel the coroutine and return None, or raise its error."""
    work, stopped = asyncio.create_task(coroutine), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([work, stopped], return_when=asyncio.FIRST_COMPLETED)
        # Before the cancellation: what the work returns after it is not its result.
        ended = work.done()
    finally:
        for task in (work, stopped):
            task.cancel()
        await asyncio.gather(work, stopped, return_exceptions=True)
    if ended or (not work.cancelled() and work.exception() is not None):
        return work.result()
    return None


async def run_to_completion(awaitable: Awaitable[T]) -> T:
    """Await to the end even if the caller is cancelled, however often; then raise CancelledError."""
    task = asyncio.ensure_future(awaitable)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            # `await task` would pass the caller's cancellation on to the task.
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None or (not task.cancelled() and task.exception() is not None):
        return task.result()
    raise cancelled

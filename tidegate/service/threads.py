"""Runs functions that may block in threads of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")
started: ContextVar[list[threading.Thread] | None] = ContextVar("started", default=None)
"""Threads that `in_thread` started in a context, if it is set to a list there."""


async def in_thread(call: Callable[[], T], name: str) -> T:
    """Runs a function in a new thread and returns its result, or raises its exception.

    A pool would be filled by functions that hang, and would wait for them when the process exits. If the
    awaiting task is cancelled, the thread continues.

    Args:
        call: The function.
        name: Name of the thread, and of the function in the message if it raises SystemExit.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():  # cancelled
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> None:
        result: Any = None
        failure: BaseException | None = None
        try:
            result = call()
        except (StopIteration, SystemExit) as error:  # they would end the awaiting task's loop
            failure = RuntimeError(f"the {name} raised {type(error).__name__}: {error}")
        except BaseException as error:  # noqa: BLE001 - raised in the awaiting task
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, failure)

    thread = threading.Thread(target=work, daemon=True, name=name)
    threads = started.get()
    if threads is not None:
        threads.append(thread)
    thread.start()
    return await future

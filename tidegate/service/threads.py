"""Runs functions that may block in threads of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
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


def in_daemon_thread(call: Callable[[], T], name: str) -> Future[T]:
    """Runs a function in a thread that does not block the exit; returns the future of its result."""
    done: Future[T] = Future()
    # A running future cannot be cancelled by its waiter; `set_result` would raise for a cancelled one.
    done.set_running_or_notify_cancel()

    def work() -> None:
        nonlocal call
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            done.set_exception(error)
        else:
            del call  # what it holds is free before the waiter goes on
            done.set_result(result)

    threading.Thread(target=work, name=name, daemon=True).start()
    return done


def within(seconds: float, call: Callable[[], T]) -> T:
    """Returns the result of a function that may hang; it goes on in its thread if it takes longer.

    Raises:
        TimeoutError: There is no result within so many seconds.
    """
    done = in_daemon_thread(call, "limited call")
    try:
        return done.result(seconds)
    except TimeoutError:
        if done.done():
            raise  # by the function itself
        raise TimeoutError(f"no reply within {seconds:g} s") from None

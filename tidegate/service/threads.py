"""Runs functions that may block in threads of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def in_thread(call: Callable[[], T], name: str) -> T:
    """Runs a function in a new thread and returns its result, or raises its exception.

    A pool would be filled by functions that hang, and would wait for them when the process exits. If the
    awaiting task is cancelled, the thread goes on.

    Args:
        call: The function.
        name: Name of the thread, also in the message about a StopIteration, which no future can carry.
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
        except StopIteration as error:
            failure = RuntimeError(f"the {name} raised StopIteration: {error}")
        except BaseException as error:  # noqa: BLE001 - raised in the awaiting task
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=work, daemon=True, name=name).start()
    return await future

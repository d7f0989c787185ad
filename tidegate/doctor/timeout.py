"""Running a user's function for so long and no longer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, call: Callable[[], T]) -> T:
    """What `call` returns or raises; raises TimeoutError where it takes longer (it is left behind)."""
    results: list[T] = []
    failures: list[BaseException] = []

    def work() -> None:
        try:
            results.append(call())
        except BaseException as failure:  # noqa: BLE001 - raised again in the caller
            failures.append(failure)

    thread = threading.Thread(target=work, daemon=True, name="under examination")
    thread.start()
    thread.join(seconds)
    if failures:
        raise failures[0]
    if not results:
        raise TimeoutError(f"no end after {seconds:g} s")
    return results[0]

"""Runs a user's function with a timeout."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, call: Callable[[], T]) -> T:
    """Returns or raises the result of `call`; raises TimeoutError if it takes longer (its thread keeps
    running)."""
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

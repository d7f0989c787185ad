"""Queue of requests and calls from other threads to the scheduler's thread."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from tidegate.engine.requests.request import Generation
from tidegate.errors import EngineError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SchedulerCall:
    """A function to run in the scheduler's thread; its result or exception is passed to the caller."""

    action: Callable[[], Any]
    result: Future[Any]

    def run(self) -> None:
        # A caller that was cancelled does not know that its action ran, so it must not run.
        if not self.result.set_running_or_notify_cancel():
            return
        try:
            self.result.set_result(self.action())
        except Exception as error:  # noqa: BLE001 - passed to the caller
            self.result.set_exception(error)

    def fail(self, error: EngineError) -> None:
        """Passes an error to the caller in place of running the function."""
        if self.result.set_running_or_notify_cancel():
            self.result.set_exception(error)


class Inbox:
    """FIFO queue with many producer threads and one consumer. Raises EngineError once it is closed."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        """The exception that closed the inbox."""
        self._items: queue.SimpleQueue[Generation | SchedulerCall] = queue.SimpleQueue()

    def submit(self, generation: Generation) -> None:
        self._put(generation)

    def call(self, action: Callable[[], T]) -> Future[T]:
        result: Future[T] = Future()
        self._put(SchedulerCall(action, result))
        return result

    def _put(self, item: Generation | SchedulerCall) -> None:
        self._items.put(item)
        if self.failure is not None:  # otherwise the `take` after `close` returns the item
            raise EngineError(f"the engine's scheduler failed: {self.failure!r}", retryable=True)

    def take(self, *, wait: bool) -> Iterator[Generation | SchedulerCall]:
        """Yields all queued items; with `wait` blocks until there is one."""
        while True:
            try:
                yield self._items.get(block=wait)
            except queue.Empty:
                return
            wait = False

    def close(self, failure: BaseException) -> None:
        self.failure = failure

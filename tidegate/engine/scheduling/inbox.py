"""What other threads ask of the scheduler's: requests, and calls between two steps."""

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
    """Something to be run in the scheduler's thread; its caller hears what it returns or raises."""

    action: Callable[[], Any]
    result: Future[Any]

    def run(self) -> None:
        if not self.result.set_running_or_notify_cancel():
            return
        try:
            self.result.set_result(self.action())
        except Exception as error:  # noqa: BLE001 - it is the caller's to hear of
            self.result.set_exception(error)


class Inbox:
    """Filled by any thread, emptied by one, in order. Raises EngineError once it is closed."""

    def __init__(self) -> None:
        self.death: BaseException | None = None
        """What closed it."""
        self._items: queue.SimpleQueue[Generation | SchedulerCall] = queue.SimpleQueue()

    def submit(self, generation: Generation) -> None:
        self._put(generation)

    def call(self, action: Callable[[], T]) -> Future[T]:
        result: Future[T] = Future()
        self._put(SchedulerCall(action, result))
        return result

    def _put(self, item: Generation | SchedulerCall) -> None:
        self._items.put(item)
        if self.death is not None:  # else what is taken after the closing holds the item
            raise EngineError(f"the engine's scheduler died: {self.death!r}", retryable=True)

    def take(self, *, wait: bool) -> Iterator[Generation | SchedulerCall]:
        """All that came in; with `wait` blocks for the first."""
        while True:
            try:
                yield self._items.get(block=wait)
            except queue.Empty:
                return
            wait = False

    def close(self, death: BaseException) -> None:
        """Nothing is accepted any more; what came in before is still to be taken."""
        self.death = death

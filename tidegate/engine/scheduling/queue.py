"""The requests in flight, and the queue of those that wait for a row."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from tidegate.engine.requests.request import Generation


class InFlight:
    """Requests that have not ended, by unique id and in the order of arrival. Used by one thread."""

    def __init__(self) -> None:
        self.waiting: deque[Generation] = deque()
        """Requests without a row, in the order in which they get one."""
        self._live: dict[str, Generation] = {}

    def __len__(self) -> int:
        """Returns the number of requests, with and without a row."""
        return len(self._live)

    def __iter__(self) -> Iterator[Generation]:
        return iter(list(self._live.values()))

    def __contains__(self, generation: Generation) -> bool:
        return self._live.get(generation.rid) is generation

    def add(self, generation: Generation) -> None:
        self._live[generation.rid] = generation
        self.waiting.append(generation)

    def has_id(self, rid: str) -> bool:
        return rid in self._live

    def matching(self, prefix: str) -> list[Generation]:
        return [generation for rid, generation in self._live.items() if rid.startswith(prefix)]

    def dequeue(self, generations: Iterable[Generation]) -> None:
        """Removes requests from the queue because they have a row or have ended."""
        removed = set(map(id, generations))
        self.waiting = deque(waiting for waiting in self.waiting if id(waiting) not in removed)

    def requeue(self, generations: Iterable[Generation]) -> None:
        """Puts requests that lost their rows at the front of the queue, in the order of arrival."""
        returned = set(map(id, generations))
        self.waiting.extendleft(live for live in reversed(self._live.values()) if id(live) in returned)

    def end(self, generation: Generation) -> None:
        """Frees the id of an ended request; `dequeue` removes it from the queue."""
        self._live.pop(generation.rid, None)

"""The requests in flight: all that have not ended, and the queue of those that have no row."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from tidegate.engine.requests.request import Generation


class InFlight:
    """Requests in the order of their arrival, each with an id of its own. Used by one thread."""

    def __init__(self) -> None:
        self.waiting: deque[Generation] = deque()
        """Who has no row, the next to get one first."""
        self._live: dict[str, Generation] = {}

    def __len__(self) -> int:
        """Those with a row, too."""
        return len(self._live)

    def __iter__(self) -> Iterator[Generation]:
        return iter(list(self._live.values()))

    def __contains__(self, generation: Generation) -> bool:
        return self._live.get(generation.rid) is generation

    def add(self, generation: Generation) -> None:
        self._live[generation.rid] = generation
        self.waiting.append(generation)

    def uses(self, rid: str) -> bool:
        return rid in self._live

    def matching(self, prefix: str) -> list[Generation]:
        return [one for rid, one in self._live.items() if rid.startswith(prefix)]

    def seat(self, generations: Iterable[Generation]) -> None:
        """They have a row, or have ended, and wait no more."""
        seated = set(map(id, generations))
        self.waiting = deque(one for one in self.waiting if id(one) not in seated)

    def unseat(self, generations: Iterable[Generation]) -> None:
        """They have lost their rows, and wait again, before those that never had one."""
        unseated = set(map(id, generations))
        self.waiting.extendleft(one for one in reversed(self._live.values()) if id(one) in unseated)

    def end(self, generation: Generation) -> None:
        """It has ended; its id is free. What waited is still to be taken from the queue (`seat`)."""
        self._live.pop(generation.rid, None)

"""A line in which sessions take turns: one that asks a hundred times does not delay who asks once.

The place of a call is settled when it comes, and it keeps that place in whatever line it waits: the first
calls of all sessions stand before the second ones, and within such a round whoever came earlier stands first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import count
from operator import itemgetter
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")
_TICKET = itemgetter(0)


class QueueTicket(NamedTuple):
    """A place in line; the lower one is served first."""

    round: int
    flow_entered: int
    number: int


@dataclass(slots=True)
class _Flow:
    entered: int
    round: int
    waiting: int = 0


class Tickets:
    """Gives out the places of several lines between which calls move."""

    def __init__(self) -> None:
        self._numbers = count()
        self._round = 0
        """The highest of those that were served: a flow that comes now begins after it."""
        self._flows: dict[str, _Flow] = {}

    def draw(self, flow: str) -> QueueTicket:
        number = next(self._numbers)
        known = self._flows.setdefault(flow, _Flow(number, self._round))
        known.round = max(known.round, self._round) + 1
        known.waiting += 1
        return QueueTicket(known.round, known.entered, number)

    def served(self, flow: str, ticket: QueueTicket) -> None:
        self._round = max(self._round, ticket.round)
        self.given_up(flow)

    def given_up(self, flow: str) -> None:
        known = self._flows[flow]
        known.waiting -= 1
        if not known.waiting:
            del self._flows[flow]


class FairQueue(Generic[T]):
    """One line, in the order of tickets."""

    def __init__(self) -> None:
        self._items: list[tuple[QueueTicket, T]] = []

    def __len__(self) -> int:
        return len(self._items)

    @property
    def first(self) -> QueueTicket:
        """The ticket that is served next; raises IndexError where nothing waits."""
        return self._items[0][0]

    def push(self, ticket: QueueTicket, item: T) -> None:
        insort(self._items, (ticket, item), key=_TICKET)

    def pop(self) -> T:
        """The next item; raises IndexError where there is none."""
        return self._items.pop(0)[1]

    def discard(self, ticket: QueueTicket) -> bool:
        """Take an item out of the line; whether it was in it."""
        at = bisect_left(self._items, ticket, key=_TICKET)
        found = at < len(self._items) and self._items[at][0] == ticket
        if found:
            del self._items[at]
        return found

    def drain(self) -> list[T]:
        """Everything, in the order in which it would have been served; the queue is empty afterwards."""
        items, self._items = self._items, []
        return [item for _, item in items]

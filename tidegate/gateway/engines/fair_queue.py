"""Round-robin fair queue keyed by flow: a flow with many queued items cannot delay the others.

An item's ticket is fixed on arrival and stays valid in every queue it moves to: the first items of all flows
precede the second ones, and arrival decides within a round.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from operator import itemgetter
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")
_TICKET = itemgetter(0)


class QueueTicket(NamedTuple):
    """A position in a queue; lower tickets are served first."""

    round: int
    flow_entered: int
    number: int


@dataclass(slots=True)
class _Flow:
    entered: int
    round: int
    waiting: int = 0


def has_room(held: Mapping[str, int], name: str, limit: int, *, least: int = 0) -> bool:
    """Whether `name` may hold one more: all hold less than the limit together, or it holds less than its
    equal share. So nobody can take what another one needs; at worst, the limit is exceeded by such shares.

    Args:
        held: Positive numbers by the name of their holder.
        name: The holder that wants one more.
        limit: Limit of all together.
        least: Share of each holder if the equal one is less.
    """
    # With `name`, which may hold nothing yet and counts as one that shares.
    share = max(least, limit // len({*held, name}))
    return sum(held.values()) < limit or held.get(name, 0) < share


class Tickets:
    """Issues tickets for several queues between which items move."""

    def __init__(self) -> None:
        self._numbers = count()
        self._round = 0
        """Highest round served so far; a new flow starts in the next one."""
        self._flows: dict[str, _Flow] = {}

    def has_room(self, flow: str, limit: int) -> bool:
        """Whether one more item of a flow may wait."""
        return has_room({name: state.waiting for name, state in self._flows.items()}, flow, limit)

    def draw(self, flow: str) -> QueueTicket:
        number = next(self._numbers)
        state = self._flows.setdefault(flow, _Flow(number, self._round))
        # From the round that is served: a flow that was idle must not claim the rounds that it missed.
        state.round = max(state.round, self._round) + 1
        state.waiting += 1
        return QueueTicket(state.round, state.entered, number)

    def served(self, flow: str, ticket: QueueTicket) -> None:
        self._round = max(self._round, ticket.round)
        self.withdraw(flow)

    def withdraw(self, flow: str) -> None:
        state = self._flows[flow]
        state.waiting -= 1
        if not state.waiting:
            del self._flows[flow]


class FairQueue(Generic[T]):
    """A queue in the order of tickets."""

    def __init__(self) -> None:
        self._items: list[tuple[QueueTicket, T]] = []

    def __len__(self) -> int:
        return len(self._items)

    @property
    def first(self) -> QueueTicket:
        return self._items[0][0]

    def push(self, ticket: QueueTicket, item: T) -> None:
        insort(self._items, (ticket, item), key=_TICKET)

    def pop(self) -> T:
        return self._items.pop(0)[1]

    def discard(self, ticket: QueueTicket) -> bool:
        at = bisect_left(self._items, ticket, key=_TICKET)
        queued = at < len(self._items) and self._items[at][0] == ticket
        if queued:
            del self._items[at]
        return queued

    def drain(self) -> list[T]:
        items, self._items = self._items, []
        return [item for _, item in items]

"""A queue in which every flow has its turn: one that asks a hundred times does not delay who asks once."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Round robin over flows, first come first served within one.

    Between two items of one flow, every other flow that waits is served once.
    """

    def __init__(self) -> None:
        self._flows: OrderedDict[str, deque[T]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, flow: str, item: T) -> None:
        self._flows.setdefault(flow, deque()).append(item)
        self._size += 1

    def pop(self) -> T:
        """The next item; raises IndexError where there is none."""
        if not self._flows:
            raise IndexError("the queue is empty")
        flow, items = self._flows.popitem(last=False)
        item = items.popleft()
        if items:
            self._flows[flow] = items
        self._size -= 1
        return item

    def discard(self, flow: str, item: T) -> bool:
        """Take an item out of the line; whether it was in it."""
        items = self._flows.get(flow, deque())
        if item not in items:
            return False
        items.remove(item)
        if not items:
            del self._flows[flow]
        self._size -= 1
        return True

    def drain(self) -> list[tuple[str, T]]:
        """Everything, in the order in which it would have been served; the queue is empty afterwards."""
        served = []
        while self._flows:
            flow = next(iter(self._flows))
            served.append((flow, self.pop()))
        return served

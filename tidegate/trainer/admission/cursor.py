"""Order of the training tasks: the next new one, and those that are issued again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from tidegate.trainer.admission.state import AdmissionProgress, TaskTicket


class TaskCursor:
    """Position of a run in the sequence of training tasks."""

    def __init__(self) -> None:
        self._index = 0
        """Index of the next new task."""
        self._recycled: deque[TaskTicket] = deque()
        """Tickets of tasks that are issued again, before new ones."""

    def next(self) -> TaskTicket:
        """Return the ticket of the next task: recycled ones first, then new ones."""
        return self._recycled.popleft() if self._recycled else self._new_ticket()

    def _new_ticket(self) -> TaskTicket:
        self._index += 1
        return TaskTicket(self._index - 1)

    def recycle(self, ticket: TaskTicket) -> None:
        """Issue a task again, after the tasks that were recycled before."""
        self._recycled.append(ticket)

    def progress(self, live: Iterable[TaskTicket]) -> AdmissionProgress:
        """Return the position, with the tickets that are recycled or of `live` groups."""
        return AdmissionProgress(self._index, [*self._recycled, *live])

    def restore(self, progress: AdmissionProgress) -> None:
        """Restore a checkpoint's progress, without `replaces`: it names groups of an earlier epoch."""
        self._index = progress.cursor
        self._recycled = deque(
            TaskTicket(ticket.index, None, ticket.stale_retries) for ticket in progress.tickets
        )

    def take(self, index: int) -> None:
        """Take the task at an index out of the tasks to issue: a group of it has resumed."""
        while self._index <= index:
            self._recycled.append(self._new_ticket())
        self._recycled = deque(ticket for ticket in self._recycled if ticket.index != index)

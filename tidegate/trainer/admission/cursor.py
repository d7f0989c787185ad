"""Order of the training tasks: the next new one, and those that are issued again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from tidegate.trainer.admission.curriculum import Curriculum
from tidegate.trainer.admission.state import AdmissionProgress, TaskTicket
from tidegate.trainer.ledger.state import LedgerItem
from tidegate.types import Task


class TaskCursor:
    """Position of a run in the sequence of training tasks.

    Args:
        curriculum: Decides which tasks are skipped.
    """

    def __init__(self, curriculum: Curriculum) -> None:
        self._curriculum = curriculum
        self._index = 0
        """Index of the next new task."""
        self._recycled: deque[TaskTicket] = deque()
        """Tickets of tasks that are issued again, before new ones."""

    def next(self, task_at: Callable[[int], Task] | None = None) -> TaskTicket:
        """Return the ticket of the next task: recycled ones first, then new ones.

        Args:
            task_at: Index → training task; None: no task is skipped.
        """
        if self._recycled:
            return self._recycled.popleft()
        if task_at is not None and self._curriculum.floor < 1:
            while not self._curriculum.accepts(self._index, task_at(self._index)):
                self._index += 1
        return self._new_ticket()

    def _new_ticket(self) -> TaskTicket:
        self._index += 1
        return TaskTicket(self._index - 1)

    def recycle(self, ticket: TaskTicket) -> None:
        """Issue a task again, after the tasks that were recycled before."""
        self._recycled.append(ticket)

    def progress(self, live: Iterable[TaskTicket]) -> AdmissionProgress:
        """Return the position, with the tickets that are recycled or of `live` groups."""
        return AdmissionProgress(self._index, [*self._recycled, *live])

    def restore(self, progress: AdmissionProgress, groups: Iterable[LedgerItem]) -> None:
        """Restore a checkpoint's progress, without `replaces`: it names groups of an earlier epoch.

        Args:
            progress: The checkpoint's.
            groups: All groups of the ledger. Those issued after the checkpoint have tasks that a curriculum
                chose: these tasks are issued again, and none that it skipped.
        """
        self._index = progress.cursor
        self._recycled = deque(
            TaskTicket(ticket.index, None, ticket.stale_retries) for ticket in progress.tickets
        )
        if self._curriculum.floor < 1:
            chosen = {group.issued.get("index", -1) for group in groups}
            self._recycled.extend(TaskTicket(index) for index in sorted(chosen) if index >= self._index)
            self._index = max(self._index, 1 + max(chosen, default=-1))

    def take(self, index: int) -> None:
        """Take the task at an index out of the tasks to issue: a group of it has resumed."""
        while self._index <= index:
            self._recycled.append(self._new_ticket())
        self._recycled = deque(ticket for ticket in self._recycled if ticket.index != index)

"""Admission's state of groups and slots, and the order of the tasks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, asdict, dataclass
from enum import StrEnum
from typing import Any

from tidegate.trainer.admission.rules import Rules
from tidegate.types import Outcome


@dataclass(frozen=True, slots=True)
class TaskTicket:
    """Permission to start one group: the task's index in the training split, and the group it replaces."""

    index: int
    replaces: str | None = None
    stale_retries: int = 0


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

    def progress(self, live: Iterable[TaskTicket]) -> dict[str, Any]:
        """Return the position, with the tickets that are recycled or of `live` groups."""
        return {"cursor": self._index, "tickets": [asdict(ticket) for ticket in (*self._recycled, *live)]}

    def restore(self, progress: Mapping[str, Any]) -> None:
        """Restore a checkpoint's progress, without `replaces`: it names groups of an earlier epoch."""
        self._index = progress["cursor"]
        self._recycled = deque(TaskTicket(**{**ticket, "replaces": None}) for ticket in progress["tickets"])

    def take(self, index: int) -> None:
        """Take the task at an index out of the tasks to issue: a group of it has resumed."""
        while self._index <= index:
            self._recycled.append(self._new_ticket())
        self._recycled = deque(ticket for ticket in self._recycled if ticket.index != index)


class Phase(StrEnum):
    """Where a group in flight is."""

    RUNNING = "running"
    """Its episodes are in progress."""
    READY = "ready"
    """It is sealed and waits at the gateway."""
    LEASED = "leased"
    """The trainer has leased it; it is in no batch yet."""
    SELECTED = "selected"
    """It is in the batch of the next step."""
    UNPUBLISHED = "unpublished"
    """A step was taken on it whose weights are not yet published."""


@dataclass(slots=True)
class Slot:
    """State of one slot of a group."""

    failures: int = 0
    """Failures charged to the task."""
    infra_failures: int = 0
    """Failures counted towards `max_infra_attempts`: of infrastructure, outside outages."""
    issued: int = 0
    """Attempts issued so far."""
    running: str | None = None
    """The attempt that runs."""
    done: str | None = None
    """The successful attempt."""
    outcome: Outcome | None = None
    """Outcome of `done`."""

    def settled(self, rules: Rules) -> bool:
        """Whether it succeeded, or one of its failure budgets is exhausted."""
        exhausted = self.failures >= rules.max_attempts or self.infra_failures >= rules.max_infra_attempts
        return self.done is not None or exhausted


@dataclass(slots=True)
class GroupState:
    """A group in flight."""

    id: str
    task: str
    ticket: TaskTicket | None
    """None: a client formed the group."""
    slots: list[Slot]
    _: KW_ONLY
    phase: Phase = Phase.RUNNING
    oldest: int | None = None
    newest: int | None = None
    client: str | None = None
    """Name of the key of the client that formed it."""
    solved: int | None = None
    """Number of solved episodes; None until it is leased."""
    version: int = 0
    """Version of the trainer when a batch selected it."""
    staleness: int = 0
    """Versions between that one and its oldest token."""

    def successful_attempts(self) -> list[str]:
        """Return the ids of successful attempts, in slot order."""
        return [slot.done for slot in self.slots if slot.done is not None]

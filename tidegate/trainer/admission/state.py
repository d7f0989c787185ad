"""What admission knows of a group: its task's place, its slots, its phase; and what a batch is cut of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tidegate.errors import LedgerError
from tidegate.trainer.admission.rules import Rules
from tidegate.types import Outcome


@dataclass(frozen=True, slots=True)
class TaskSlot:
    """The right to start one group: a place in the training split, and what it replaces."""

    index: int
    replaces: str | None = None
    stale_retries: int = 0


class Phase(StrEnum):
    RUNNING = "running"
    READY = "ready"
    LEASED = "leased"
    CUT = "cut"
    UNPUBLISHED = "unpublished"


@dataclass(slots=True)
class Slot:
    """One of a group's places."""

    failures: int = 0
    """Endings that are charged to the task."""
    mishaps: int = 0
    """`infra_error` endings outside of outages."""
    issued: int = 0
    running: str | None = None
    done: str | None = None
    outcome: Outcome | None = None
    """Of the attempt that stands."""

    def settled(self, rules: Rules) -> bool:
        """Whether it succeeded, or one of its budgets is spent."""
        spent = self.failures >= rules.max_attempts or self.mishaps >= rules.max_infra_attempts
        return self.done is not None or spent


@dataclass(slots=True)
class GroupState:
    """A group that has not left the count yet."""

    id: str
    task: str
    ticket: TaskSlot
    slots: list[Slot]
    phase: Phase = Phase.RUNNING
    oldest: int | None = None
    newest: int | None = None

    def standing(self) -> list[str]:
        """The attempts that make up the group, in slot order."""
        return [slot.done for slot in self.slots if slot.done is not None]


@dataclass(frozen=True, slots=True)
class BatchSelection:
    """A batch, cut: group ids in order of completion, and their staleness at this moment."""

    version: int
    groups: list[str]
    staleness: list[int]

    @classmethod
    def of(cls, parts: Sequence[BatchSelection]) -> BatchSelection:
        """Minibatches as one batch; they were cut at one version, as no publish lies between."""
        versions = {part.version for part in parts}
        if len(versions) != 1:
            raise LedgerError(f"minibatches of one batch were cut at the versions {sorted(versions)}")
        return cls(
            versions.pop(),
            [group for part in parts for group in part.groups],
            [age for part in parts for age in part.staleness],
        )


@dataclass(slots=True)
class AdmissionProgress:
    """What a checkpoint holds of admission, so that a resumed run goes on with the same tasks."""

    cursor: int = 0
    tickets: list[TaskSlot] = field(default_factory=list)

"""Record of each training task of a run, from its ledger: groups, failed attempts, quarantine."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tidegate.trainer.ledger.entries import LedgerEntry, State
from tidegate.trainer.ledger.state import LedgerItem, LedgerState


@dataclass(slots=True)
class TaskRecord:
    """The groups and failures of one task.

    Attributes:
        task: Id of the task.
        kind: Its kind; empty without one.
        groups: Groups by state.
        filtered_solved: Filtered groups with all episodes solved.
        filtered_failed: Filtered groups with no episode solved.
        failures: Failed attempts by cause (`failure_cause`). Another one followed each, unless its slot was
            given up.
        quarantine: The ledger's entry, if it is quarantined.
    """

    task: str
    kind: str = ""
    groups: Counter[str] = field(default_factory=Counter)
    filtered_solved: int = 0
    filtered_failed: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    quarantine: LedgerEntry | None = None

    def add(self, group: LedgerItem, committed: float) -> None:
        """Count a group of the task."""
        state = group.final(committed)
        self.kind = group.issued.get("task_kind", "") or self.kind
        self.groups[state.value] += 1
        self.filtered_solved += state is State.FILTERED and group.end.get("solved") == group.end.get(
            "episodes", 0
        )
        self.filtered_failed += state is State.FILTERED and group.end.get("solved") == 0

    def to_json(self) -> dict[str, Any]:
        """Return the record as a flat object; `quarantined` is None, or has the time, group and reason."""
        entry = self.quarantine
        why = (
            None if entry is None else {name: entry.get(name) for name in ("time", "group", "outcome", "why")}
        )
        return {
            "task": self.task,
            "kind": self.kind,
            "issued": self.groups.total(),
            **{state.value: self.groups[state.value] for state in State},
            "filtered_solved": self.filtered_solved,
            "filtered_failed": self.filtered_failed,
            "failures": dict(sorted(self.failures.items())),
            "quarantined": why,
        }


def task_records(past: LedgerState, committed: float = math.inf) -> list[TaskRecord]:
    """Return the record of every task that a run has issued or that clients named.

    Args:
        past: State of the run.
        committed: The ledger's position in the newest checkpoint's marker.

    Returns:
        The records: quarantined tasks first, then those with the most failures.
    """
    records: dict[str, TaskRecord] = {}
    for group in past.groups.values():
        task = group.issued["task"]
        records.setdefault(task, TaskRecord(task)).add(group, committed)
    for attempt in past.attempts.values():
        if (cause := attempt.cause) is not None:
            records[past.groups[attempt.issued["group"]].issued["task"]].failures[cause] += 1
    for task in past.quarantined:
        records.setdefault(task, TaskRecord(task)).quarantine = past.quarantines[task]
    return sorted(records.values(), key=lambda one: (one.quarantine is None, -one.failures.total(), one.task))

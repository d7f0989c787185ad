"""What the report and the dashboard show of the ledger.

The consistency of the ledger is not checked: `tidegate audit` does that.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from tidegate.trainer.checkpoint import checkpoint
from tidegate.trainer.ledger.entries import ENDED, LedgerEntry, State
from tidegate.trainer.ledger.state import LedgerState
from tidegate.viewer.formatting import printable

STATES = (*ENDED, State.LIVE)


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    """Groups and attempts by state, outcomes and reasons of ended attempts, and `staleness` (in versions) of
    the groups that were trained on. `starts` has the Unix times of the run's start and of each resumption.
    `end` is the entry of the run's end; None while it runs, or if it was killed."""

    groups: Counter[State]
    attempts: Counter[State]
    outcomes: Counter[str]
    reasons: Counter[str]
    staleness: Counter[int]
    starts: list[float]
    end: LedgerEntry | None


def apply_entries(state: LedgerState, entries: Iterable[Mapping[str, Any]]) -> None:
    """Updates the state with the next entries; skips invalid ones."""
    for entry in entries:
        with contextlib.suppress(KeyError, TypeError, ValueError):
            state.apply(cast(LedgerEntry, entry))


def count(state: LedgerState, committed: int) -> LedgerCounts:
    """Returns the counts, given the ledger position of the newest checkpoint."""
    groups, attempts = state.groups.values(), state.attempts.values()
    ended = [attempt for attempt in attempts if attempt.state is not State.LIVE]
    failed = [attempt for attempt in ended if attempt.state is State.FAILED and attempt.end.get("why")]
    stepped = [group for group in groups if group.state is State.STEPPED and not group.discarded]
    return LedgerCounts(
        groups=state.counts(state.groups, committed),
        attempts=state.counts(state.attempts, committed),
        outcomes=Counter(printable(attempt.end.get("outcome") or "none") for attempt in ended),
        reasons=Counter(printable(attempt.end["why"])[:300] for attempt in failed),
        staleness=Counter(age for group in stepped if (age := group.end.get("staleness")) is not None),
        starts=[entry.get("time", 0.0) for entry in state.publishes if entry["event"] == "started"],
        end=state.end,
    )


def group_to_wire(state: LedgerState, group_id: str) -> dict[str, Any] | None:
    """Returns a group's entries, and its attempts that failed or were cancelled; None if it is unknown.

    `version` is the trainer's version when the group was issued, `ended_version` the one when it was trained
    on, or against which it was too stale.
    """
    group = state.groups.get(group_id)
    if group is None:
        return None
    issued, end = group.issued, group.end
    return {
        "task": printable(issued.get("task") or ""),
        "version": issued.get("version"),
        "replaces": printable(issued.get("replaces") or ""),
        "step": end.get("step"),
        "ended": end.get("time"),
        "ended_version": end.get("version"),
        "staleness": end.get("staleness"),
        "oldest": end.get("oldest"),
        "lost": [
            {
                "id": printable(name),
                "slot": attempt.issued.get("slot"),
                "state": attempt.state.value,
                "outcome": printable(attempt.end.get("outcome") or ""),
                "why": printable(attempt.end.get("why") or ""),
            }
            for name, attempt in state.members(group_id).items()
            if attempt.state in (State.FAILED, State.CANCELLED)
        ],
    }


def replaced_by(state: LedgerState, group_id: str) -> str:
    """Returns the group that was issued in place of a stale one; empty if there is none."""
    groups = state.groups.items()
    return next((printable(name) for name, group in groups if group.issued.get("replaces") == group_id), "")


def quarantined(state: LedgerState) -> list[dict[str, str]]:
    """Returns the quarantined tasks with the failure that was the last one."""
    names = ("task", "group", "outcome", "why")
    return [
        {name: printable(entry.get(name) or "") for name in names} for entry in state.quarantines.values()
    ]


def committed(run_dir: Path) -> int:
    """Returns the ledger's position in the newest checkpoint's marker; 0 without one."""
    newest = newest_checkpoint(run_dir)
    if newest is None:
        return 0
    try:
        return int(json.loads((newest / checkpoint.MARKER).read_text(encoding="utf-8"))["ledger"])
    except (ValueError, KeyError, TypeError):
        return 0


def newest_checkpoint(run_dir: Path) -> Path | None:
    """Returns the complete checkpoint of the highest step: one whose marker was written."""
    steps = checkpoint.committed(run_dir)
    return steps[max(steps)] if steps else None

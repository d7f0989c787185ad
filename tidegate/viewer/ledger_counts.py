"""Counts groups and attempts of the ledger by state, and the reasons of failures.

It does not check the ledger's consistency; `tidegate audit` does.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tidegate.observer import GROUP_ENDINGS
from tidegate.viewer.formatting import printable
from tidegate.viewer.run_files import objects

STATES = (*GROUP_ENDINGS, "live")


@dataclass(slots=True)
class LedgerCounts:
    """Counts by state; `staleness` of the groups that were stepped on, in versions."""

    groups: Counter[str] = field(default_factory=Counter)
    attempts: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    staleness: Counter[int] = field(default_factory=Counter)
    versions: int = 0
    starts: list[float] = field(default_factory=list)
    """Unix times of the run's start and of each resumption."""


@dataclass(slots=True)
class _Item:
    group: str
    state: str = "live"
    seq: int = -1
    staleness: int | None = None


class LedgerCounter:
    """Counts a ledger entry by entry, so that a growing ledger is read only once."""

    def __init__(self) -> None:
        self._items: dict[tuple[str, str], _Item] = {}
        self._members: dict[str, list[_Item]] = {}
        """Group id → the items of the group and its attempts."""
        self._abandoned: set[str] = set()
        self._so_far = LedgerCounts()

    def enter(self, entry: Mapping[str, Any]) -> None:
        kind, event = entry.get("kind"), entry.get("event")
        if kind == "run":
            self._enter_run(entry)
        elif kind in ("group", "attempt"):
            key = (str(kind), str(entry.get("id")))
            if event == "issued":
                item = self._items[key] = _Item(str(entry.get("group", key[1])))
                self._members.setdefault(item.group, []).append(item)
            elif event == "ended" and key in self._items:
                self._end(self._items[key], str(kind), entry)
            elif event == "put_back":
                self._put_back(key[1])

    def counts(self, committed: int) -> LedgerCounts:
        """Returns the counts so far, given the ledger position of the newest checkpoint.

        A stepped group counts as trained if its ending precedes `committed` and no later start rolled it
        back.
        """
        so_far = self._so_far
        counts = LedgerCounts(
            outcomes=so_far.outcomes.copy(),
            reasons=so_far.reasons.copy(),
            versions=so_far.versions,
            starts=list(so_far.starts),
        )
        for (kind, _), item in self._items.items():
            counter = counts.groups if kind == "group" else counts.attempts
            counter["trained" if self._kept(item, committed) else item.state] += 1
            if kind == "group" and item.staleness is not None and item.group not in self._abandoned:
                counts.staleness[item.staleness] += 1
        return counts

    def group_state(self, group_id: str, committed: int) -> str | None:
        """Returns a group's state, None if it was never issued."""
        item = self._items.get(("group", group_id))
        if item is None:
            return None
        return "trained" if self._kept(item, committed) else item.state

    def is_abandoned(self, group_id: str) -> bool:
        """Returns whether the run was resumed at a position before the group's ending, which rolls it
        back."""
        return group_id in self._abandoned

    def _kept(self, item: _Item, committed: int) -> bool:
        return item.state == "stepped" and item.seq < committed and item.group not in self._abandoned

    def _enter_run(self, entry: Mapping[str, Any]) -> None:
        self._so_far.versions += entry.get("event") == "publishing"
        if entry.get("event") == "started":
            self._so_far.starts.append(float(entry.get("time", 0.0)))
            position = entry.get("position") or 0
            self._abandoned.update(item.group for item in self._items.values() if item.seq >= position)

    def _put_back(self, group: str) -> None:
        """Makes a group and its stepped attempts live again, because its step was rolled back."""
        self._abandoned.discard(group)
        for item in self._members.get(group, []):
            if item.state == "stepped":
                item.state, item.seq, item.staleness = "live", -1, None

    def _end(self, item: _Item, kind: str, entry: Mapping[str, Any]) -> None:
        item.state, item.seq = str(entry.get("state")), int(entry.get("seq", 0))
        if kind == "group":
            staleness = entry.get("staleness")
            item.staleness = staleness if item.state == "stepped" and isinstance(staleness, int) else None
            return
        self._so_far.outcomes[printable(entry.get("outcome") or "none")] += 1
        if item.state == "failed" and entry.get("why"):
            self._so_far.reasons[printable(entry["why"])[:300]] += 1


def count_ledger(run_dir: Path, remarks: list[str]) -> LedgerCounts | None:
    """Counts `ledger.jsonl`; returns None if there is none."""
    path = run_dir / "ledger.jsonl"
    if not path.exists():
        return None
    counter = LedgerCounter()
    for entry in objects(path, remarks):
        counter.enter(entry)
    return counter.counts(committed(run_dir))


def committed(run_dir: Path) -> int:
    """The ledger's position in the newest checkpoint's marker; 0 without one."""
    newest = newest_checkpoint(run_dir)
    if newest is None:
        return 0
    try:
        return int(json.loads((newest / "COMMITTED").read_text(encoding="utf-8"))["ledger"])
    except (ValueError, KeyError, TypeError):
        return 0


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The complete checkpoint of the highest step: one whose marker was written."""
    found = [path.parent for path in (run_dir / "checkpoints").glob("step_*/COMMITTED")]
    numbered = [path for path in found if path.name.removeprefix("step_").isdigit()]
    return max(numbered, key=lambda path: int(path.name.removeprefix("step_")), default=None)

"""What the ledger comes to: how many groups and slot attempts are in which state, and why some failed.

This counts; `tidegate audit` proves.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tidegate.observer import GROUP_ENDINGS
from tidegate.viewer.files import objects
from tidegate.viewer.text import printable

STATES = (*GROUP_ENDINGS, "live")


@dataclass(slots=True)
class Books:
    """Counts by state; `staleness` of the groups that were stepped on, in versions."""

    groups: Counter[str] = field(default_factory=Counter)
    attempts: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    staleness: Counter[int] = field(default_factory=Counter)
    versions: int = 0
    starts: list[float] = field(default_factory=list)
    """When the run was started, in Unix seconds: once, and once more at each resumption."""


@dataclass(slots=True)
class _Item:
    group: str
    state: str = "live"
    seq: int = -1
    staleness: int | None = None


def read_books(run_dir: Path, remarks: list[str]) -> Books | None:
    """Count `ledger.jsonl`; None where there is none.

    What was stepped on counts as trained when a checkpoint's marker lies behind it, and a later start
    did not go back to before it.
    """
    path = run_dir / "ledger.jsonl"
    if not path.exists():
        return None
    books = Books()
    items: dict[tuple[str, str], _Item] = {}
    abandoned: set[str] = set()
    for entry in objects(path, remarks):
        kind, event = entry.get("kind"), entry.get("event")
        if kind == "run":
            _enter_run(books, entry, items, abandoned)
        elif kind in ("group", "attempt"):
            key = (str(kind), str(entry.get("id")))
            if event == "issued":
                items[key] = _Item(str(entry.get("group", key[1])))
            elif event == "ended" and key in items:
                _end(books, items[key], str(kind), entry)
    committed = _committed(run_dir)
    for (kind, _), item in items.items():
        kept = item.state == "stepped" and item.seq < committed and item.group not in abandoned
        counter = books.groups if kind == "group" else books.attempts
        counter["trained" if kept else item.state] += 1
        if kind == "group" and item.staleness is not None and item.group not in abandoned:
            books.staleness[item.staleness] += 1
    return books


def _enter_run(
    books: Books, entry: dict[str, Any], items: dict[tuple[str, str], _Item], abandoned: set[str]
) -> None:
    books.versions += entry.get("event") == "published"
    if entry.get("event") == "started":
        books.starts.append(float(entry.get("time", 0.0)))
        position = entry.get("position") or 0
        abandoned.update(item.group for item in items.values() if item.seq >= position)


def _end(books: Books, item: _Item, kind: str, entry: dict[str, Any]) -> None:
    item.state, item.seq = str(entry.get("state")), int(entry.get("seq", 0))
    if kind == "group":
        staleness = entry.get("staleness")
        item.staleness = staleness if item.state == "stepped" and isinstance(staleness, int) else None
        return
    books.outcomes[printable(entry.get("outcome") or "none")] += 1
    if item.state == "failed" and entry.get("why"):
        books.reasons[printable(entry["why"])[:300]] += 1


def _committed(run_dir: Path) -> int:
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

"""Checks the fate of every episode of a run that was killed and resumed.

It reads the run's files and shares no code with their writers. The *surviving lineage* is the part of the
ledger that the last marker commits: an entry is undone if a later start resumed from a position before it.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Fate:
    """Ledger entries of one group or attempt, in order."""

    issued: dict[str, Any]
    endings: list[dict[str, Any]] = field(default_factory=list)
    returns: list[int] = field(default_factory=list)
    """`seq` of every entry that put it or its group back."""


@dataclass
class Lineage:
    """Result of the check: `lost` and `doubled` must be empty; `groups` maps trained groups to steps."""

    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    groups: dict[str, int] = field(default_factory=dict)
    put_back: int = 0
    steps: int = 0


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    """The complete lines of a run's metrics; it may be running."""
    path = run_dir / "metrics.jsonl"
    complete = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return [json.loads(line) for line in complete.splitlines()]


def last_step(run_dir: Path) -> int:
    return max((line["step"] for line in metrics_of(run_dir)), default=0)


def lineage_of(run_dir: Path, groups_per_batch: int) -> Lineage:
    """Checks a run that has ended."""
    found = Lineage()
    book = list(_lines(run_dir / "ledger.jsonl"))
    groups, attempts = _fates(book)
    starts = [(one["seq"], one["position"] or 0) for one in book if one["event"] == "started"][1:]
    marker = max((run_dir / "checkpoints").glob("step_*/COMMITTED"), key=_step_of)
    committed, found.steps = json.loads(marker.read_text())["ledger"], _step_of(marker)
    found.put_back = sum(one["event"] == "put_back" for one in book)
    for name, fate in [*groups.items(), *attempts.items()]:
        _judge(name, fate, starts, committed, found)
    trained = {name for name in attempts if attempts[name].issued["group"] in found.groups}
    trained = {name for name in trained if attempts[name].endings[-1]["state"] == "stepped"}
    _compare(_files(run_dir, found.steps), trained, found)
    _tasks(groups, found)
    sizes = Counter(found.groups.values())
    for step in range(1, found.steps + 1):
        short = groups_per_batch - sizes[step]
        if short:
            (found.lost if short > 0 else found.doubled).append(f"step {step} has {sizes[step]} groups")
    return found


def _judge(name: str, fate: Fate, starts: list[tuple[int, int]], committed: int, found: Lineage) -> None:
    """Reports an episode with no end in the surviving lineage as lost, one with two ends as doubled."""
    standing = []
    for end in fate.endings:
        seq = end["seq"]
        undone = end["state"] == "stepped" and any(at > seq >= position for at, position in starts)
        back = any(at > seq for at in fate.returns)
        if undone and not back:
            found.lost.append(f"{name}: its step {end.get('step')} was undone, and it was not put back")
        if back and not undone:
            found.doubled.append(f"{name}: it had ended {end['state']} for good, and was put back")
        if not undone:
            standing.append(end)
    if not standing:
        found.lost.append(f"{name}: it never ended")
    if len(standing) > 1:
        found.doubled.append(f"{name}: it ended {len(standing)} times")
    if standing and standing[0]["state"] == "stepped":
        if standing[0]["seq"] >= committed:
            found.lost.append(f"{name}: no marker lies behind its step")
        if "group" not in fate.issued:
            found.groups[name] = standing[0]["step"]


def _fates(book: list[dict[str, Any]]) -> tuple[dict[str, Fate], dict[str, Fate]]:
    groups: dict[str, Fate] = {}
    attempts: dict[str, Fate] = {}
    for one in book:
        items = groups if one["kind"] == "group" else attempts
        if one["kind"] == "run":
            continue
        if one["event"] == "issued":
            items[one["id"]] = Fate(one)
        elif one["event"] == "ended":
            items[one["id"]].endings.append(one)
        elif one["event"] == "put_back":
            members = [fate for fate in attempts.values() if fate.issued["group"] == one["id"]]
            for fate in [groups[one["id"]], *members]:
                if fate.endings and fate.endings[-1]["state"] == "stepped":
                    fate.returns.append(one["seq"])
    return groups, attempts


def _files(run_dir: Path, steps: int) -> dict[str, list[int]]:
    """Attempt → the steps whose trajectory file lists it as trained."""
    found: dict[str, list[int]] = defaultdict(list)
    for path in sorted((run_dir / "trajectories").glob("step_*.jsonl")):
        if (step := int(path.stem.removeprefix("step_"))) > steps:
            continue
        for line in _lines(path):
            if line["state"] == "stepped":
                found[line["metadata"]["attempt"]].append(step)
    return found


def _compare(files: dict[str, list[int]], trained: set[str], found: Lineage) -> None:
    """Checks that the trajectory files hold each attempt trained according to the ledger exactly once."""
    for name in trained - files.keys():
        found.lost.append(f"{name}: it was trained on according to the ledger, but no step's file has it")
    for name in files.keys() - trained:
        found.doubled.append(f"{name}: it is in the file of step {files[name][0]}, but not in the ledger")
    for name, steps in files.items():
        if len(steps) > 1:
            found.doubled.append(f"{name}: it is in the files of the steps {steps}")


def _tasks(groups: dict[str, Fate], found: Lineage) -> None:
    """Checks that each task of the training split is trained on at most once."""
    places = Counter(groups[name].issued["index"] for name in found.groups)
    found.doubled += [
        f"task {index} was trained on {number} times" for index, number in places.items() if number > 1
    ]


def _step_of(marker: Path) -> int:
    return int(marker.parent.name.removeprefix("step_"))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    later = sorted(
        path.parent.glob(f"{path.stem}.*{path.suffix}"), key=lambda part: int(part.suffixes[0][1:])
    )
    for part in (path, *later):
        with part.open(encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)

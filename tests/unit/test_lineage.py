"""The chaos benchmark's check of a run's files: no finding in a correct run, and each planted fault."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from lineage import Lineage, lineage_of

Book = list[dict[str, Any]]
Files = dict[int, list[str]]


def issued(group: str, index: int) -> Book:
    return [
        {"kind": "group", "event": "issued", "id": group, "index": index},
        {"kind": "attempt", "event": "issued", "id": f"{group}.0.1", "group": group},
    ]


def ended(group: str, state: str, step: int | None = None) -> Book:
    return [
        {"kind": "attempt", "event": "ended", "id": f"{group}.0.1", "state": state},
        {"kind": "group", "event": "ended", "id": group, "state": state, "step": step},
    ]


def started(position: int | None) -> Book:
    return [{"kind": "run", "event": "started", "position": position}]


def honest() -> tuple[Book, Files, int]:
    """`a` is committed; `b` and `c` lie behind the marker: `b` is trained on again, `c` is too old then."""
    first = [*started(None), *issued("a", 0), *ended("a", "stepped", 1)]
    book = [
        *first, *issued("b", 1), *ended("b", "stepped", 2), *issued("c", 2), *ended("c", "stepped", 3),
        *started(len(first)),
        {"kind": "group", "event": "put_back", "id": "b"}, {"kind": "group", "event": "put_back", "id": "c"},
        *ended("c", "stale"), *ended("b", "stepped", 2),
    ]  # fmt: skip
    return book, {1: ["a.0.1"], 2: ["b.0.1"]}, len(book)


def read(run_dir: Path, book: Book, files: Files, committed: int) -> Lineage:
    (run_dir / "trajectories").mkdir()
    (run_dir / "ledger.jsonl").write_text(
        "".join(json.dumps({"seq": seq, **one}) + "\n" for seq, one in enumerate(book))
    )
    for step, attempts in files.items():
        lines = [{"state": "stepped", "metadata": {"attempt": one}} for one in attempts]
        path = run_dir / "trajectories" / f"step_{step:06d}.jsonl"
        path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    marker = run_dir / "checkpoints" / "step_2" / "COMMITTED"
    marker.parent.mkdir(parents=True)
    marker.write_text(json.dumps({"ledger": committed}))
    return lineage_of(run_dir, 1)


def test_a_resumed_run_that_lost_nothing_has_no_finding(tmp_path: Path) -> None:
    found = read(tmp_path, *honest())
    assert (found.lost, found.doubled) == ([], [])
    assert (found.groups, found.put_back, found.steps) == ({"a": 1, "b": 2}, 2, 2)


def _never_put_back(book: Book, files: Files) -> None:
    del book[next(n for n, one in enumerate(book) if one["event"] == "put_back") :]


def _ended_without_being_put_back(book: Book, files: Files) -> None:
    book[:] = [one for one in book if one["event"] != "put_back"]


def _never_ended(book: Book, files: Files) -> None:
    del book[-2:]


def _in_two_files(book: Book, files: Files) -> None:
    files[2].append("a.0.1")


def _in_no_file(book: Book, files: Files) -> None:
    files[2].clear()


def _a_stranger_in_the_file(book: Book, files: Files) -> None:
    files[2].append("c.0.1")


def _the_task_twice(book: Book, files: Files) -> None:
    next(one for one in book if one["id"] == "b")["index"] = 0  # type: ignore[call-overload]


def _trained_one_put_back(book: Book, files: Files) -> None:
    book += [{"kind": "group", "event": "put_back", "id": "a"}, *ended("a", "stepped", 2)]


@pytest.mark.parametrize(
    ("fault", "lost", "doubled"),
    [
        (_never_put_back, "it was not put back", ""),
        (_ended_without_being_put_back, "it was not put back", ""),
        (_never_ended, "never ended", ""),
        (_in_two_files, "", "in the files of the steps [1, 2]"),
        (_in_no_file, "no step's file has it", ""),
        (_a_stranger_in_the_file, "", "not in the ledger"),
        (_the_task_twice, "", "task 0 was trained on 2 times"),
        (_trained_one_put_back, "", "for good, and was put back"),
    ],
)
def test_every_fault_is_seen(
    tmp_path: Path, fault: Callable[[Book, Files], None], lost: str, doubled: str
) -> None:
    book, files, _ = honest()
    for one in book:
        one.setdefault("id", "")
    fault(book, files)
    found = read(tmp_path, book, files, len(book))
    assert any(lost in one for one in found.lost) if lost else True
    assert any(doubled in one for one in found.doubled) if doubled else True
    assert found.lost or found.doubled


def test_steps_that_no_marker_commits_are_discarded(tmp_path: Path) -> None:
    book, files, committed = honest()
    found = read(tmp_path, book, files, committed - 2)
    assert "b: no marker lies behind its step" in found.lost

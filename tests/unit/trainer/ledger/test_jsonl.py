"""JSONL files that end in the middle of a line, as after a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.trainer.learning_fixtures import make_trajectory, make_turn
from tidegate.trainer.ledger.entries import State
from tidegate.trainer.ledger.jsonl import complete_lines, drop_torn_line
from tidegate.trainer.records.trajectories import (
    LONGEST_ANSWER,
    TrajectoryFiles,
    bounded_answer,
    decode_trajectory,
    read_lines,
)


@pytest.mark.parametrize(
    ("content", "kept"), [(b"", b""), (b"a\n", b"a\n"), (b"a\nb", b"a\n"), (b"b", b""), (b"\n\nc", b"\n\n")]
)
def test_a_torn_line_is_dropped_and_no_other(tmp_path: Path, content: bytes, kept: bytes) -> None:
    path = tmp_path / "lines"
    path.write_bytes(content)
    assert list(complete_lines(path)) == kept.splitlines(keepends=True)
    drop_torn_line(path)
    assert path.read_bytes() == kept


def test_where_there_is_no_file_none_is_made(tmp_path: Path) -> None:
    drop_torn_line(tmp_path / "lines")
    assert list(complete_lines(tmp_path / "lines")) == []
    assert not (tmp_path / "lines").exists()


def test_a_failure_that_was_cut_short_does_not_spoil_the_next_one(tmp_path: Path) -> None:
    failed = make_trajectory([make_turn(0, None, [1, 2], [3, 4, 5], version=1)])
    failed.metadata = {"attempt": "g1.0.1"}
    TrajectoryFiles(tmp_path).append([failed], State.FAILED)
    path = tmp_path / "trajectories" / "failed.jsonl"
    path.write_bytes(path.read_bytes() + path.read_bytes()[:100])
    failed.metadata = {"attempt": "g1.0.2"}
    TrajectoryFiles(tmp_path).append([failed], State.FAILED)
    assert [line["attempt"] for line in read_lines(path)] == ["g1.0.1", "g1.0.2"]


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        (None, None),
        ("#### 4", "#### 4"),
        ({"all": ["a", 4]}, {"all": ["a", 4]}),
        ("é" * LONGEST_ANSWER, "é" * LONGEST_ANSWER),
        ("é" * (LONGEST_ANSWER + 1000), "é" * LONGEST_ANSWER + " … (1,000 more characters)"),
        ([7] * LONGEST_ANSWER, ("[" + "7," * LONGEST_ANSWER)[:LONGEST_ANSWER] + " … (2,001 more characters)"),
        (Path("a"), "a"),
        ({"n": 2**70}, {"n": 2**70}),
        ("half \ud800", r"'half \ud800'"),
    ],
)
def test_a_gold_answer_is_kept_as_it_is_or_cut_where_it_is_long(answer: Any, kept: Any) -> None:
    assert bounded_answer(answer) == kept


def test_a_line_has_the_gold_answer_and_an_older_one_is_read_without(tmp_path: Path) -> None:
    failed = make_trajectory([make_turn(0, None, [1, 2], [3, 4, 5], version=1)])
    failed.answer = ["4", "four"]
    TrajectoryFiles(tmp_path).append([failed], State.FAILED)
    (line,) = read_lines(tmp_path / "trajectories" / "failed.jsonl")
    assert line["answer"] == decode_trajectory(line).answer == ["4", "four"]
    del line["answer"]
    assert decode_trajectory(line).answer is None

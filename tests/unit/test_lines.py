"""Files of lines, as a killed process leaves them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.learning_fixtures import make_trajectory, make_turn
from tidegate.trainer.lines import drop_torn_line, whole_lines
from tidegate.trainer.trajectories import TrajectoryFiles, read_lines


@pytest.mark.parametrize(
    ("content", "kept"), [(b"", b""), (b"a\n", b"a\n"), (b"a\nb", b"a\n"), (b"b", b""), (b"\n\nc", b"\n\n")]
)
def test_a_torn_line_is_dropped_and_no_other(tmp_path: Path, content: bytes, kept: bytes) -> None:
    path = tmp_path / "lines"
    path.write_bytes(content)
    assert whole_lines(path) == (len(kept), kept.count(b"\n"))
    drop_torn_line(path)
    assert path.read_bytes() == kept


def test_where_there_is_no_file_none_is_made(tmp_path: Path) -> None:
    drop_torn_line(tmp_path / "lines")
    assert whole_lines(tmp_path / "lines") == (0, 0)
    assert not (tmp_path / "lines").exists()


def test_a_failure_that_was_cut_short_does_not_spoil_the_next_one(tmp_path: Path) -> None:
    failed = make_trajectory([make_turn(0, None, [1, 2], [3, 4, 5], version=1)])
    TrajectoryFiles(tmp_path).failure(failed, "g1.0.1")
    path = tmp_path / "trajectories" / "failed.jsonl"
    path.write_bytes(path.read_bytes() + path.read_bytes()[:100])
    TrajectoryFiles(tmp_path).failure(failed, "g1.0.2")
    assert [line["attempt"] for line in read_lines(path)] == ["g1.0.1", "g1.0.2"]

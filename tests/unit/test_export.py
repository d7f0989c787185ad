"""Trajectories read back as they were, and handed to other tools."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import orjson
import pytest
from pyarrow import parquet

from tests.unit.dashboard_run import write_dashboard_run
from tidegate.cli import main
from tidegate.trainer.batch import rows_of
from tidegate.trainer.trajectories import read_lines, readable, recorded, step_files
from tidegate.types import Outcome, Trajectory, Turn, VersionSpan


def one_turn(logprobs: np.ndarray) -> Trajectory:
    ids = np.arange(len(logprobs), dtype=np.int32)
    turn = Turn(
        0, None, np.array([7, 8], dtype=np.int32), ids, logprobs, (VersionSpan(3, 0, len(ids)),), "stop", 1.0,
        output_mask=np.array([1] * (len(ids) - 1) + [0], dtype=np.uint8), kv_version=2, started=12.5,
    )  # fmt: skip
    return Trajectory("s", "t", "e", "train", Outcome.TRUNCATED, [turn], group_id="g", slot=1, reward=0.5)


def test_a_recorded_trajectory_is_the_same_bit_for_bit() -> None:
    logprobs = -np.random.default_rng(0).exponential(size=500).astype(np.float32)
    before = one_turn(logprobs)
    line = orjson.loads(orjson.dumps(readable(before), option=orjson.OPT_SERIALIZE_NUMPY))
    after = recorded({**line, "state": "stepped", "advantage": 1.0})
    assert after.turns[0].logprobs.tobytes() == logprobs.tobytes()
    assert after.to_wire() == before.to_wire()


def test_sft_holds_the_conversations_that_earned_it(tmp_path: Path) -> None:
    write_dashboard_run(tmp_path / "run")
    assert main(["export", str(tmp_path / "run"), "--sft", "--min-reward", "0.5"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "export.jsonl").read_text().splitlines()]
    wanted = [
        line
        for path in step_files(tmp_path / "run").values()
        for line in read_lines(path)
        if line["reward"] is not None and line["reward"] >= 0.5
    ]
    assert lines
    assert [line["messages"] for line in lines] == [line["messages"] for line in wanted]
    assert all(line["reward"] >= 0.5 for line in lines)


def test_parquet_holds_every_sequence_with_its_tokens(tmp_path: Path) -> None:
    write_dashboard_run(tmp_path / "run")
    out = tmp_path / "all.parquet"
    assert main(["export", str(tmp_path / "run"), "--parquet", "--out", str(out)]) == 0
    table = parquet.read_table(out).to_pylist()
    expected = [
        row
        for path in step_files(tmp_path / "run").values()
        for line in read_lines(path)
        for row in rows_of(recorded(line), line["advantage"] or 0.0)
    ]
    assert len(table) == len(expected)
    for found, row in zip(table, expected, strict=True):
        assert found["input_ids"] == row.ids.tolist()
        assert found["trained"] == row.mask.tolist()
        assert np.array_equal(np.float32(found["logprobs"]), row.logprobs)
        assert found["versions"] == row.versions.tolist()


@pytest.mark.parametrize("kind", ["--sft", "--parquet"])
def test_a_directory_without_trajectories_is_refused(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(tmp_path), kind]) != 0
    assert "no trajectories there" in capsys.readouterr().err

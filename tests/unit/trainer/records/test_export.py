"""Exported trajectories equal the recorded ones, and other tools can read them."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import msgspec
import numpy as np
import orjson
import pytest
from pyarrow import parquet

from tests.unit.viewer.dashboard_run import write_dashboard_run
from tests.unit.viewer.viewer_run import write_run
from tidegate.cli import main
from tidegate.trainer.batch.rows import rows_of
from tidegate.trainer.records.trajectories import decode_trajectory, encode_trajectory, read_lines, step_files
from tidegate.turn import Turn, VersionSpan
from tidegate.types import Outcome, ToolCall, Trajectory, from_wire, to_wire
from tidegate.viewer.formatting import known


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
    line = orjson.loads(orjson.dumps(encode_trajectory(before), option=orjson.OPT_SERIALIZE_NUMPY))
    after = decode_trajectory({**line, "state": "stepped", "advantage": 1.0})
    assert after.turns[0].logprobs.tobytes() == logprobs.tobytes()
    assert to_wire(after) == to_wire(before)


def test_likeliest_and_kept_ids_are_packed_and_older_records_have_none() -> None:
    """At 32 ids a token takes less than 200 bytes in memory and on disk."""
    rng = np.random.default_rng(0)
    before = one_turn(np.zeros(500, np.float32))
    [turn] = before.turns
    top = np.sort(-rng.exponential(4.0, (500, 32)).astype(np.float16), axis=1)[:, ::-1]
    turn.top_logprobs = np.ascontiguousarray(top).reshape(-1)
    turn.top_ids = rng.integers(0, 150_000, 500 * 32).astype(np.int32)
    turn.kept_counts = rng.integers(1, 20, 500).astype(np.int32)
    turn.kept_ids = rng.integers(0, 150_000, turn.kept_counts.sum()).astype(np.int32)
    assert (turn.top_k, turn.top_ids.nbytes + turn.top_logprobs.nbytes) == (32, 192 * 500)
    assert turn.top_k == from_wire(to_wire(before), Trajectory).turns[0].top_k
    line = orjson.loads(orjson.dumps(encode_trajectory(before), option=orjson.OPT_SERIALIZE_NUMPY))
    text = line["turns"][0]
    assert len(text["top_ids"]) + len(text["top_logprobs"]) < 200 * 500
    assert to_wire(decode_trajectory(line)) == to_wire(before)
    del text["top_ids"], text["top_logprobs"], text["kept_ids"], text["kept_counts"]
    [older] = decode_trajectory(line).turns
    assert older.top_ids is older.kept_ids is older.kept_counts is None


def test_policies_are_restored_and_absent_from_lines_of_a_run_with_one() -> None:
    before = one_turn(np.zeros(2, np.float32))
    line = orjson.loads(orjson.dumps(encode_trajectory(before), option=orjson.OPT_SERIALIZE_NUMPY))
    assert "policy_rewards" not in line
    assert "policy" not in line["turns"][0]
    assert decode_trajectory(line).turns[0].policy == ""
    before.turns[0].policy, before.policy_rewards = "solver", {"solver": 0.25}
    line = orjson.loads(orjson.dumps(encode_trajectory(before), option=orjson.OPT_SERIALIZE_NUMPY))
    assert to_wire(decode_trajectory(line)) == to_wire(before)
    assert [before.reward_of(name) for name in ("solver", "verifier")] == [0.25, 0.5]


def test_tool_calls_are_restored_and_older_records_have_none() -> None:
    before = one_turn(np.zeros(2, np.float32))
    before.tool_calls = [ToolCall("enter", {"digit": 4, "big": 2**63}, "é", True, 0, 12.5, 0.25, known=False)]
    line = orjson.loads(orjson.dumps(encode_trajectory(before), option=orjson.OPT_SERIALIZE_NUMPY))
    assert decode_trajectory(line).tool_calls == before.tool_calls
    assert from_wire(to_wire(before), Trajectory).tool_calls == before.tool_calls
    del line["tool_calls"]
    assert decode_trajectory(line).tool_calls == []
    older = msgspec.msgpack.decode(to_wire(before))
    del older["tool_calls"]
    assert from_wire(msgspec.msgpack.encode(older), Trajectory).tool_calls == []


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


def test_corrections_are_demonstrations(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    write_dashboard_run(run_dir)
    assert main(["export", str(run_dir), "--corrections"]) == 0
    assert (run_dir / "export.jsonl").read_text() == ""
    step, path = next(iter(step_files(run_dir).items()))
    line, *others = path.read_text().splitlines()
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "so"}]
    notes = {"1.expert": {"comment": "no", "correction": chat}, "0.a": {"comment": "fine"}, "x": []}
    episode = json.loads(line) | {"metadata": {"feedback": notes}}
    others = [
        json.dumps(json.loads(other) | {"metadata": {"feedback": ["a client's own"]}}) for other in others
    ]
    path.write_text("\n".join([json.dumps(episode), *others, ""]))
    assert main(["export", str(run_dir), "--corrections"]) == 0
    written = json.loads((run_dir / "export.jsonl").read_text())
    assert written == {"messages": chat, "name": "expert", "step": step}


def test_csv_holds_the_metrics_of_each_step(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", steps=4)
    assert main(["export", str(run_dir), "--csv"]) == 0
    with (run_dir / "export.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    written = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [float(row["step"]) for row in rows] == [line["step"] for line in written]
    for row, line in zip(rows, written, strict=True):
        numbers = {key: value for key, value in line.items() if known(value) is not None}
        assert {key: float(row[key]) for key in numbers} == numbers
        assert {row[key] for key in row.keys() - numbers.keys()} <= {""}, (
            "what the step lacks, or is no number"
        )


def test_parquet_holds_every_sequence_with_its_tokens(tmp_path: Path) -> None:
    write_dashboard_run(tmp_path / "run")
    out = tmp_path / "all.parquet"
    assert main(["export", str(tmp_path / "run"), "--parquet", "--out", str(out)]) == 0
    table = parquet.read_table(out).to_pylist()
    expected = [
        row
        for path in step_files(tmp_path / "run").values()
        for line in read_lines(path)
        for row in rows_of(decode_trajectory(line), line["advantage"] or 0.0)
    ]
    assert len(table) == len(expected)
    for found, row in zip(table, expected, strict=True):
        assert found["input_ids"] == row.ids.tolist()
        assert found["trained"] == row.mask.tolist()
        assert np.array_equal(np.float32(found["logprobs"]), row.logprobs)
        assert found["versions"] == row.versions.tolist()


def test_an_episode_of_the_batch_that_was_left_out_is_marked_as_not_trained(tmp_path: Path) -> None:
    """`truncated_episodes = "mask"`: its reward counted in the group, its tokens did not."""
    turn = np.full(4, -0.5, dtype=np.float32)
    lines = [
        {"state": state, "advantage": advantage, **encode_trajectory(one_turn(turn))}
        for state, advantage in (("stepped", None), ("stepped", 0.5), ("filtered", None))
    ]
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "trajectories" / "step_000001.jsonl").write_bytes(
        b"".join(orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n" for line in lines)
    )
    assert main(["export", str(tmp_path), "--parquet"]) == 0
    table = parquet.read_table(tmp_path / "export.parquet").to_pylist()
    assert [sum(row["trained"]) for row in table] == [0, 3, 3]


@pytest.mark.parametrize("kind", ["--sft", "--parquet"])
def test_what_cannot_be_exported_leaves_what_was_there(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_dashboard_run(tmp_path / "run")
    out = tmp_path / "out"
    out.write_text("before")
    newest = max(step_files(tmp_path / "run").values())
    newest.write_bytes(newest.read_bytes()[:-20])
    assert main(["export", str(tmp_path / "run"), kind, "--out", str(out)]) == 1
    assert main(["export", str(tmp_path / "nowhere"), kind, "--out", str(out)]) == 2
    assert main(["export", str(tmp_path / "run"), kind, "--out", str(tmp_path / "no" / "out")]) == 1
    said = capsys.readouterr().err
    assert "not JSON" in said
    assert "nowhere: there is no such directory" in said
    assert f"cannot write {tmp_path}/no/out: " in said
    assert out.read_text() == "before"
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("kind", ["--sft", "--parquet"])
def test_a_directory_without_trajectories_is_refused(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metrics.jsonl").touch()
    assert main(["export", str(tmp_path), kind]) != 0
    assert "has no trajectories" in capsys.readouterr().err

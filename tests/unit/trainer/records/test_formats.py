"""Rows for other trainers hold the recorded values; the libraries that are installed read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from tests.unit.trainer.learning_fixtures import make_turn
from tidegate.cli import main
from tidegate.cli.export import FORMAT_NAMES
from tidegate.trainer.batch.rows import TrainingSequence
from tidegate.trainer.records.export import sequences_of
from tidegate.trainer.records.formats import FORMATS
from tidegate.trainer.records.trajectories import encode_trajectory, read_lines, step_files
from tidegate.types import Outcome, Trajectory

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 9007199254740993}'}}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "1 + "}, {"type": "text", "text": "1?"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [CALL, {"function": {"name": "f", "arguments": "{"}}],
    },
    {"role": "tool", "content": "2", "tool_call_id": "c1"},
    {"role": "tool", "content": "?", "tool_call_id": "lost"},
    {"role": "assistant", "content": "2"},
]


def episode(slot: int, reward: float) -> Trajectory:
    """Two turns with a tool result between them, a branch, and a token that a grammar excluded."""
    turns = [
        make_turn(0, None, [1, 2, 3], [11, 12 + slot], version=4),
        make_turn(1, None, [1, 5], [21], version=4, delivered=True),
        make_turn(2, 0, [6, 7], [31, 32, 33], version=5, temperature=0.7, forced=(1,)),
    ]
    turns[0].started = 1_700_000_000.25
    for turn in turns:
        turn.top_ids = np.arange(2 * len(turn.output_ids), dtype=np.int32)
        turn.top_logprobs = np.float16(-0.1) - turn.top_ids.astype(np.float16)
        turn.kept_counts = np.arange(1, 1 + len(turn.output_ids), dtype=np.int32)
        turn.kept_ids = 7 * np.arange(turn.kept_counts.sum(), dtype=np.int32)
    return Trajectory(
        f"s{slot}", "t", "math", "train", Outcome.COMPLETED, turns,
        group_id="g", slot=slot, reward=reward, messages=MESSAGES,
    )  # fmt: skip


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run whose batch has a group of two episodes; an episode of another group was dropped."""
    lines = [
        {"state": state, "advantage": advantage, **encode_trajectory(episode(slot, reward))}
        for state, advantage, slot, reward in (
            ("stepped", -0.1, 0, 0.0), ("stepped", None, 1, 0.3), ("stale", None, 0, 1.0),
        )
    ]  # fmt: skip
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "trajectories" / "step_000001.jsonl").write_bytes(
        b"".join(orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n" for line in lines)
    )
    return tmp_path


def exported(run_dir: Path, name: str, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert main(["export", str(run_dir), "--for", name]) == 0
    assert f"{name} has no place for: {FORMATS[name].lacks}" in capsys.readouterr().out
    return [json.loads(line) for line in (run_dir / "export.jsonl").read_text().splitlines()]


def batch(run_dir: Path) -> list[tuple[dict[str, Any], TrainingSequence]]:
    [path] = step_files(run_dir).values()
    lines = [line for line in read_lines(path) if line["state"] == "stepped"]
    return [(line, row) for line in lines for row in sequences_of(line)]


def assert_equal(found: Any, expected: np.ndarray[Any, Any]) -> None:
    assert np.asarray(found, dtype=expected.dtype).tolist() == expected.tolist()


def test_names_are_those_of_the_command() -> None:
    assert tuple(FORMATS) == FORMAT_NAMES


def test_tinker_gets_the_ids_logprobs_and_advantages(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, expected = exported(run_dir, "tinker", capsys), batch(run_dir)
    assert len(rows) == len(expected) == 4
    for found, (line, row) in zip(rows, expected, strict=True):
        [chunk] = found["model_input"]["chunks"]
        tensors = {name: np.array(one["data"], one["dtype"]) for name, one in found["loss_fn_inputs"].items()}
        assert_equal([*chunk["tokens"], tensors["target_tokens"][-1]], row.ids)
        assert_equal(tensors["target_tokens"], row.ids[1:])
        assert_equal(tensors["logprobs"], row.logprobs[1:])
        assert_equal(tensors["advantages"] != 0, row.mask[1:])
        assert set(tensors["advantages"].tolist()) <= {0.0, float(np.float32(line["advantage"] or 0))}


def test_of_several_policies_one_is_written_with_its_rewards(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [path] = step_files(run_dir).values()
    lines = list(read_lines(path))
    for line in lines:
        line["policy_rewards"] = {"verifier": 0.75}
        for turn in line["turns"]:
            turn["policy"] = "verifier" if turn["index"] == 1 else "solver"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["export", str(run_dir), "--for", "trl"]) == 2
    assert "one of several: name one with --policy" in capsys.readouterr().err
    for name, rewards in {"solver": [0.0, 0.3], "verifier": [0.75, 0.75], "critic": []}.items():
        assert main(["export", str(run_dir), "--for", "trl", "--policy", name]) == 0
        rows = [json.loads(line) for line in (run_dir / "export.jsonl").read_text().splitlines()]
        assert [row["reward"] for row in rows] == rewards
        assert all((row["completion_ids"][0] == 21) == (name == "verifier") for row in rows)
    assert main(["export", str(run_dir), "--for", "atif"]) == 0, "whole episodes, with each reply's policy"
    document = json.loads((run_dir / "export.jsonl").read_text().splitlines()[0])
    replies = [step["metrics"]["extra"]["policy"] for step in document["steps"] if "metrics" in step]
    assert replies == ["solver", "solver"]
    assert document["extra"]["policy_rewards"] == {"verifier": 0.75}


@pytest.mark.parametrize(
    ("name", "completion", "logprobs", "mask", "reward"),
    [
        ("trl", "completion_ids", "logprobs", "env_mask", "reward"),
        ("verl", "response_ids", "response_logprobs", "response_mask", "reward_score"),
    ],
)
def test_trl_and_verl_get_prompts_and_completions(
    run_dir: Path, capsys: pytest.CaptureFixture[str], name: str, completion: str, logprobs: str, mask: str,
    reward: str,
) -> None:  # fmt: skip
    rows, expected = exported(run_dir, name, capsys), batch(run_dir)
    assert len(rows) == len(expected)
    for found, (line, row) in zip(rows, expected, strict=True):
        start = len(found["prompt_ids"])
        assert_equal(found["prompt_ids"] + found[completion], row.ids)
        assert_equal(found[logprobs], row.logprobs[start:])
        assert_equal(found[mask], row.mask[start:])
        assert not row.mask[:start].any()
        assert found[reward] == line["reward"]
        if name == "trl":
            assert_equal(found["versions"], row.versions[start:])
            assert (found["group_id"], found["session_id"]) == ("g", line["session_id"])
        elif row.mask.any():
            spans = found["extra_fields"]
            assert (spans["uid"], spans["min_global_steps"]) == ("g", row.versions[row.mask].min())
            assert spans["max_global_steps"] == row.versions[row.mask].max()


def test_prime_rl_gets_every_array(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, expected = exported(run_dir, "prime-rl", capsys), batch(run_dir)
    assert len(rows) == len(expected)
    for found, (_, row) in zip(rows, expected, strict=True):
        assert_equal(found["token_ids"], row.ids)
        assert_equal(found["mask"], row.mask)
        assert_equal(found["logprobs"], row.logprobs)
        assert_equal(found["temperatures"], row.temperature)
        assert_equal(found["advantages"], row.advantages)


def test_atif_has_the_conversation_with_its_tokens(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    documents = exported(run_dir, "atif", capsys)
    assert [one["extra"]["state"] for one in documents] == ["stepped", "stepped", "stale"]
    steps, recorded = documents[0]["steps"], episode(0, 0.0)
    assert [one["source"] for one in steps] == ["system", "user", "agent", "agent"]
    assert [one["message"] for one in steps] == ["Be brief.", "1 + 1?", "", "2"]
    calls, results = steps[2]["tool_calls"], steps[2]["observation"]["results"]
    assert calls[0]["arguments"] == {"a": 9007199254740993}
    assert (calls[1]["arguments"], calls[1]["extra"]) == ({}, {"arguments": "{"})
    assert results == [{"content": "2", "source_call_id": "c1"}, {"content": "?"}]
    for step, turn in zip(steps[2:], [recorded.turns[0], recorded.turns[2]], strict=True):
        metrics = step["metrics"]
        assert_equal(metrics["prompt_token_ids"], recorded.prompt_ids(turn))
        assert_equal(metrics["completion_token_ids"], turn.output_ids)
        assert_equal(metrics["logprobs"], turn.logprobs)
        assert metrics["extra"]["version_spans"] == [list(span) for span in turn.version_spans]
        assert turn.top_ids is not None
        assert_equal(metrics["extra"]["top_ids"], turn.top_ids.reshape(-1, 2))
        assert turn.kept_ids is not None
        assert_equal(metrics["extra"]["kept_ids"], turn.kept_ids)
        assert sum(metrics["extra"]["kept_counts"]) == len(turn.kept_ids)
    assert documents[1]["extra"]["reward"] == 0.3


def test_parquet_has_the_likeliest_and_the_kept_ids(run_dir: Path) -> None:
    from pyarrow import parquet

    assert main(["export", str(run_dir), "--parquet"]) == 0
    rows = parquet.read_table(run_dir / "export.parquet").to_pylist()
    for found, (_, row) in zip(rows, batch(run_dir), strict=False):
        assert row.sampler_ids is not None
        assert row.sampler_listed is not None
        assert_equal(found["top_ids"], row.sampler_ids)
        assert_equal(found["top_logprobs"], row.sampler_listed)
        assert row.kept_ids is not None
        assert row.kept_counts is not None
        assert_equal(found["kept_ids"], row.kept_ids)
        assert_equal(found["kept_counts"], row.kept_counts)


def test_the_installed_libraries_read_their_rows(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows that the libraries' own types take, without a value changed."""
    read = []
    for name, reader in READERS.items():
        rows = exported(run_dir, name, capsys)
        try:
            taken = [reader(row) for row in rows]
        except ImportError:
            continue
        assert [like(again, row) for again, row in zip(taken, rows, strict=True)] == rows
        read.append(name)
    if not read:
        pytest.skip(f"none of the libraries of {', '.join(READERS)} is installed")


def like(found: Any, row: Any) -> Any:
    """The part of `found` that `row` has, too: types of libraries fill in defaults."""
    if isinstance(row, dict):
        return {name: like(found[name], value) for name, value in row.items()}
    return [like(*pair) for pair in zip(found, row, strict=True)] if isinstance(row, list) else found


def read_tinker(row: dict[str, Any]) -> Any:
    from tinker.types._pydantic_types.datum import Datum  # what the SDK sends

    return Datum.model_validate(row).model_dump()


def read_verl(row: dict[str, Any]) -> Any:
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

    return AgentLoopOutput.model_validate(row).model_dump()


def read_prime_rl(row: dict[str, Any]) -> Any:
    from prime_rl.transports.rollouts.types import TrainingSample

    sample = TrainingSample(**row)
    return {name: getattr(sample, name) for name in row}


def read_atif(row: dict[str, Any]) -> Any:
    from harbor.models.trajectories import Trajectory as Document

    return Document.model_validate(row).model_dump()


READERS = {"tinker": read_tinker, "verl": read_verl, "prime-rl": read_prime_rl, "atif": read_atif}

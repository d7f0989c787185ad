"""Recorded episodes are selected by their rewards, and keep their recorded ids and masks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.viewer.dashboard_run import write_dashboard_run
from tidegate.cli import main
from tidegate.errors import ConfigError
from tidegate.gateway.rendering.renderer import Renderer
from tidegate.settings.sft import SFTSettings
from tidegate.sft.demonstration import Demonstration
from tidegate.sft.episodes import read_corrections, read_episodes
from tidegate.trainer.batch.rows import rows_of
from tidegate.trainer.records.export import write_parquet
from tidegate.trainer.records.trajectories import decode_trajectory, read_lines, step_files


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    write_dashboard_run(tmp_path / "run")
    return tmp_path / "run"


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [line for path in step_files(run_dir).values() for line in read_lines(path)]


def rewrite(run_dir: Path, change: Any) -> None:
    """Changes the recorded lines."""
    for path in step_files(run_dir).values():
        changed = [change(dict(line)) for line in read_lines(path)]
        path.write_text("".join(json.dumps(line) + "\n" for line in changed))


def read(path: Path, **settings: Any) -> list[Demonstration]:
    return list(read_episodes(path, SFTSettings(episodes=[path], **settings)))


def sequences(found: list[Demonstration]) -> list[tuple[list[int], list[bool]]]:
    return [(row.ids.tolist(), row.mask.tolist()) for each in found for row in each.rows]


def sessions(found: list[Demonstration]) -> list[str]:
    return [each.place.rpartition(" ")[2] for each in found]


def test_ids_and_masks_are_those_that_were_recorded(run_dir: Path) -> None:
    found = read(run_dir, min_reward=0.0)
    recorded = [rows_of(decode_trajectory(line), 1.0) for line in lines(run_dir)]
    assert sequences(found) == [(row.ids.tolist(), row.mask.tolist()) for rows in recorded for row in rows]
    assert any(len(each.rows) > 1 for each in found), "a branch is a sequence of its own"
    forced = [row for each in found for row in each.rows if not row.mask[row.mask.argmax() :].all()]
    assert forced, "tokens that a grammar forced are not trained on"
    for row in (row for each in found for row in each.rows):
        assert row.advantages.tolist() == row.mask.astype(float).tolist()
        assert row.temperature.tolist() == [1.0] * len(row.ids)


def test_episodes_are_selected_by_reward_group_and_part(run_dir: Path) -> None:
    good = [f"s-g{step}-good-1" for step in (1, 2, 3)]
    alike = [f"s-g{step}-alike-{slot}" for step in (1, 2, 3) for slot in (0, 1)]
    old = [f"s-g{step}-old-1" for step in (1, 2, 3)]
    assert sorted(sessions(read(run_dir))) == sorted([*good, *alike, *old])
    best = [name for name in alike if name.endswith("0")]
    assert sorted(sessions(read(run_dir, per_group=1))) == sorted([*good, *best, *old])
    assert len(read(run_dir, per_group=1, min_reward=0.0)) == 9
    assert len(read(run_dir, per_group=2, min_reward=0.0)) == 18

    def judged(line: dict[str, Any]) -> dict[str, Any]:
        return {**line, "reward_parts": {"judge": 0.75 if line["slot"] == 0 else 0.25}}

    rewrite(run_dir, judged)
    picks = sessions(read(run_dir, reward_part="judge", min_reward=0.5))
    assert len(picks) == 9
    assert all(name.endswith("-0") for name in picks)
    with pytest.raises(ConfigError, match=r"has a part 'jduge'.* did you mean 'judge'.*there are judge"):
        read(run_dir, reward_part="jduge")


def test_episodes_that_were_left_out_of_a_step_stay_left_out(run_dir: Path) -> None:
    """As a truncated one with `trainer.truncated_episodes = "mask"`; the next best of its group counts."""

    def masked(line: dict[str, Any]) -> dict[str, Any]:
        return {**line, "advantage": None} if line["state"] == "stepped" and line["slot"] == 1 else line

    rewrite(run_dir, masked)
    chosen = sessions(read(run_dir, min_reward=0.0, per_group=1))
    assert [name for name in chosen if "good" in name] == [f"s-g{step}-good-0" for step in (1, 2, 3)]


@pytest.mark.parametrize(
    "settings",
    [{}, {"min_reward": 0.0}, {"per_group": 1}, {"min_reward": 2.0}, {"reward_part": "form", "per_group": 1}],
)
def test_an_exported_table_gives_the_same_sequences_as_the_run(
    run_dir: Path, settings: dict[str, Any]
) -> None:
    table = run_dir.parent / "all.parquet"
    assert main(["export", str(run_dir), "--parquet", "--out", str(table)]) == 0
    of_run, of_table = read(run_dir, **settings), read(table, **settings)
    assert sequences(of_table) == sequences(of_run)
    assert [each.task for each in of_table] == [each.task for each in of_run]


@pytest.mark.parametrize("table", [False, True])
def test_of_several_policies_one_is_chosen_with_its_rewards(run_dir: Path, table: bool) -> None:
    def split(line: dict[str, Any]) -> dict[str, Any]:
        line["policy_rewards"] = {"verifier": -1.0}
        for turn in line["turns"]:
            turn["policy"] = "solver" if turn["index"] == 0 else "verifier"
            turn["parent"] = None
        return line

    whole = read(run_dir, min_reward=-5.0)
    rewrite(run_dir, split)
    path = run_dir
    if table:
        path = run_dir / "table.parquet"
        write_parquet(run_dir, path)
    with pytest.raises(ConfigError, match=r"one of several: name one with sft\.policy"):
        read(path, min_reward=-5.0)
    mine = read(path, min_reward=-5.0, policy="solver")
    assert sessions(mine) == sessions(whole)
    assert sum(len(one.rows) for one in mine) == len(mine)
    assert read(path, min_reward=-0.5, policy="verifier") == []
    assert read(path, min_reward=-5.0, policy="critic") == []


def test_what_holds_no_episodes_is_refused(run_dir: Path, tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    parquet.write_table(pa.table({"reward": [1.0]}), tmp_path / "other.parquet")
    for name, why in (
        ("absent", "neither a run's directory nor a table"),
        ("bad.parquet", "cannot be read"),
        ("other.parquet", "has no column session_id"),
    ):
        with pytest.raises(ConfigError, match=why):
            read(tmp_path / name)


def test_a_correction_follows_the_recorded_prompt(run_dir: Path) -> None:
    corrected = [{"role": "user", "content": "What is 3 + 4?"}, {"role": "assistant", "content": "#### 12"}]
    notes = {"2.expert": {"correction": corrected}, "0.a": {"comment": "fine"}}

    def note(line: dict[str, Any]) -> dict[str, Any]:
        return {**line, "metadata": {"feedback": notes}} if line["session_id"] == "s-g2-good-1" else line

    rewrite(run_dir, note)
    renderer = Renderer.load(run_dir.parent / "model")
    [found] = read_corrections(run_dir, renderer)
    trajectory = decode_trajectory(next(line for line in lines(run_dir) if line["metadata"].get("feedback")))
    prompt = trajectory.prompt_ids(trajectory.turns[2])
    [row] = found.rows
    assert row.ids[: len(prompt)].tolist() == prompt.tolist()
    assert row.mask.tolist() == (np.arange(len(row.ids)) >= len(prompt)).tolist()
    assert renderer.codec.decode_all(row.ids[len(prompt) :].tolist()) == "#### 12<|im_end|>"
    notes["9.expert"] = {"correction": corrected}
    rewrite(run_dir, note)
    with pytest.raises(ConfigError, match=r"correction 'expert': there is no reply 9 to correct"):
        list(read_corrections(run_dir, renderer))

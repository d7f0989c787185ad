"""Runs with several policies: killed and resumed, with shared engines, and against an earlier self."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import REPO
from tests.e2e.runs import held, metrics, training
from tests.engine_runs import DUO, adapters_of_two_policies_continue_after_a_kill
from tidegate.cli import main
from tidegate.trainer.records.trajectories import read_lines, step_files

pytestmark = pytest.mark.slow
SELF_PLAY = REPO / "examples" / "selfplay" / "config.toml"


def turns_of(run_dir: Path, step: int) -> list[dict[str, object]]:
    return [turn for line in read_lines(step_files(run_dir)[step]) for turn in line["turns"]]


def test_adapters_of_two_policies_continue_after_a_kill_as_if_there_was_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    adapters_of_two_policies_continue_after_a_kill(run_dir, [], 1e-4)
    assert {turn["policy"] for turn in turns_of(run_dir, 4)} == {"solver", "verifier"}
    assert main(["replay", str(run_dir), "--json"]) == 0
    steps = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(one["same"] for one in steps)
    assert [one["same_weights"] for one in steps if one["step"] in (2, 4)] == [True, True]
    best = run_dir / "checkpoints" / "best"  # whole models, which any engine serves
    assert all((best / name / "model.safetensors").is_file() for name in ("solver", "verifier"))


def test_an_earlier_self_has_the_weights_of_versions_ago_and_is_not_trained(tmp_path: Path) -> None:
    run_dir, config = tmp_path / "run", tmp_path / "config.toml"
    config.write_text(DUO.read_text().replace("learning_rate = 1e-3", 'earlier = "solver"\nbehind = 2'))
    with training(run_dir, "--trainer.steps=4", "--gateway.shards=2", config=config) as run:
        assert run.wait() == 0, run.output()[-3000:]
    held(run_dir)
    newest = run_dir / "weights" / "v000004" / "verifier" / "model.safetensors"
    assert newest.samefile(run_dir / "weights" / "v000002" / "solver" / "model.safetensors")
    exempt = {turn["policy"]: turn["exempt"] for turn in turns_of(run_dir, 4)}
    assert exempt == {"solver": None, "verifier": "policy 'verifier', which is frozen"}
    assert not any(key.startswith("policy/verifier/loss") for line in metrics(run_dir) for key in line)


def test_self_play_trains_the_players_moves_and_evaluates_against_a_fixed_opponent(tmp_path: Path) -> None:
    pytest.importorskip("textarena")
    run_dir = tmp_path / "run"
    with training(run_dir, "--trainer.steps=3", "--policies.opponent.behind=1", config=SELF_PLAY) as run:
        assert run.wait() == 0, run.output()[-3000:]
    held(run_dir)
    exempt = {turn["policy"]: turn["exempt"] for turn in turns_of(run_dir, 3)}
    assert exempt == {"player": None, "opponent": "policy 'opponent', which is frozen"}
    episodes = [*read_lines(step_files(run_dir)[3])]
    movers = {line["turns"][0]["policy"] for line in episodes}
    assert movers == {"player", "opponent"}, "seats alternate"
    for group in {line["group_id"] for line in episodes}:  # one seat and one start in a group
        assert len({line["task_id"] for line in episodes if line["group_id"] == group}) == 1
    last = [line for line in metrics(run_dir) if "eval/reward" in line][-1]
    assert 0 < last["eval/episode/best_moves"] < 1
    assert {"eval/episode/illegal_moves", "eval/episode/won_by_illegal_move"} <= last.keys()

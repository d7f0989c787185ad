"""Evaluations beside training, on engines of their own and on all of them, and suites."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.runs import held, metrics, training

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SUITES = [
    "--eval.first=false", "--eval.last=false", "--eval.every=2", "--eval.beside_training=true",
    "--eval.suites.unseen.set=unseen_templates", "--eval.suites.unseen.tasks=4",
    "--eval.suites.unseen.every=2", "--trainer.steps=7",
]  # fmt: skip


@pytest.mark.parametrize("own", [True, False])
def test_training_goes_on_while_a_version_is_evaluated(tmp_path: Path, own: bool) -> None:
    run_dir = tmp_path / "run"
    engines = ["--engine.count=2", "--eval.engines=1"] if own else ["--eval.max_versions=2"]
    with training(run_dir, *SUITES, *engines) as run:
        assert run.wait() == 0, run.output()
    held(run_dir)
    lines = metrics(run_dir)
    assert [line["step"] for line in lines] == list(range(1, 8)), "there is no line before the first step"
    evaluated = [line for line in lines if "eval/reward" in line]
    assert [line["eval/step"] for line in evaluated] == [2, 4, 6]
    assert all(line["eval/step"] < line["step"] for line in evaluated)
    for line in evaluated:
        assert line["eval/failed"] == line["eval/unseen/failed"] == 0, run.output()
        assert (line["eval/episodes"], line["eval/unseen/episodes"]) == (8, 4)
        span = line["eval/version_max"] - line["eval/version_min"]
        assert span <= (0 if own else 1)
        after = line["eval/version_min"] - line["eval/step"]  # a version is published after each step
        assert 0 <= after <= (0 if own else 1)
    sets = [
        (one["eval_set"], one["mode"])
        for one in map(json.loads, (run_dir / "trajectories" / "eval_000002.jsonl").read_text().splitlines())
    ]
    assert sorted(set(sets)) == [("", "sampled"), ("suite/unseen", "sampled")]
    best = json.loads((run_dir / "checkpoints" / "best" / "best.json").read_text())
    assert best["eval/reward"] == max(line["eval/reward"] for line in evaluated)
    assert best["step"] in [2, 4, 6]


def test_the_live_version_is_evaluated_while_worse_candidates_are_tested(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    settings = [
        "--engine.count=2", "--trainer.promotion.mode=evaluated", "--trainer.promotion.margin=0.3",
        "--trainer.learning_rate=0.02", "--trainer.steps=3", "--trainer.groups_per_batch=2",
        "--eval.beside_training=true", "--eval.every=2", "--eval.interim_tasks=16", "--eval.first=false",
        "--eval.last=false",
    ]  # fmt: skip
    with training(run_dir, *settings) as run:
        assert run.wait() == 0, run.output()
    held(run_dir)
    rolled_back = [
        line
        for line in map(json.loads, (run_dir / "ledger.jsonl").read_text().splitlines())
        if line["event"] == "rolled_back"
    ]
    assert len(rolled_back) == 3
    (evaluated,) = (line for line in metrics(run_dir) if "eval/reward" in line)
    assert (evaluated["eval/step"], evaluated["eval/failed"]) == (2, 0)
    assert evaluated["eval/version_min"] == evaluated["eval/version_max"] == 0, "the base is still live"

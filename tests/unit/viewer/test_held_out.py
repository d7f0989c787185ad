"""Every held-out set and suite has a name, a score and a curve, whatever it is called."""

from __future__ import annotations

import json
from pathlib import Path

from tests.unit.viewer.viewer_run import write_run
from tidegate.trainer.rollout import evaluator
from tidegate.viewer import held_out
from tidegate.viewer.held_out import episodes_key, held_out_key, held_out_names
from tidegate.viewer.overview import scores
from tidegate.viewer.plots import reward_chart
from tidegate.viewer.run_files import read_run
from tidegate.viewer.summary import scores_of


def test_episodes_belong_to_the_metric_that_the_evaluator_writes() -> None:
    assert held_out.SUITE == evaluator.SUITE
    kinds = [("", "sampled"), ("", "greedy"), ("hard", "sampled"), ("suite/zebra", "greedy")]
    assert [held_out_key(name, mode) for name, mode in kinds] == [
        "eval/reward", "eval/reward_greedy", "eval/reward_hard", "eval/zebra/reward",
    ]  # fmt: skip


def test_names_and_their_order() -> None:
    keys = [
        "eval/zebra/reward", "eval/reward_b_set", "eval/seconds", "eval/reward_greedy", "eval/reward",
        "reward/mean", "eval/reward_a", "eval/abc/reward", "eval/abc/episodes", "eval/episodes_a",
    ]  # fmt: skip
    assert list(held_out_names(keys).items()) == [
        ("eval/reward", "held out, sampled"), ("eval/reward_greedy", "held out, greedy"),
        ("eval/reward_a", "held out, a"), ("eval/reward_b_set", "held out, b set"),
        ("eval/abc/reward", "suite abc"), ("eval/zebra/reward", "suite zebra"),
    ]  # fmt: skip


def test_the_number_of_episodes_of_each() -> None:
    keys = ("eval/reward", "eval/reward_greedy", "eval/reward_reward", "eval/reward_model/reward")
    assert [episodes_key(key) for key in keys] == [
        "eval/episodes", "eval/episodes_greedy", "eval/episodes_reward", "eval/reward_model/episodes",
    ]  # fmt: skip


def test_scores_without_a_prefix_and_without_numbers() -> None:
    assert scores_of({"reward": 0.5, "hard/reward": 1, "why": "text"}) == {
        "eval/reward": 0.5,
        "eval/hard/reward": 1.0,
    }
    assert scores_of(None) == {}


def test_sets_of_any_name_are_in_the_chart_and_among_the_scores(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", steps=50)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if value := row.pop("eval/reward_unseen_templates", None):
            row |= {"eval/reward_long_ones": value, "eval/hard/reward": 0.1, "eval/hard/episodes": 7}
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = read_run(run_dir)
    chart = reward_chart(run)
    assert chart is not None
    assert [name for name, _, _ in chart.legend][2:] == [
        "held out, sampled", "held out, greedy", "long ones", "suite hard",
    ]  # fmt: skip
    assert [(score.name, score.over) for score in scores(run)][2:] == [
        ("held out, long ones", ""), ("suite hard", "over 7 problems"),
    ]  # fmt: skip

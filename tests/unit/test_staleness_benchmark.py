"""What the staleness benchmark makes of its cells."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import staleness


def rows_of(rewards: dict[tuple[str, str], list[float]]) -> list[dict[str, Any]]:
    cell = dict.fromkeys(("staleness_mean", "steps", "skipped", *staleness.FIGURES), 1.0)
    return [
        staleness.summary(bound, loss, [{**cell, "reward": reward} for reward in seeds])
        for (bound, loss), seeds in rewards.items()
    ]


DEFAULT, OTHER = staleness.DEFAULT, "gspo"
ROWS = rows_of(
    {
        ("0", DEFAULT): [0.8, 0.9], ("2", DEFAULT): [0.7, 0.74], ("8", DEFAULT): [0.4, 0.4],
        ("0", OTHER): [0.9, 0.9], ("2", OTHER): [0.8, 0.8], ("8", OTHER): [0.8, 0.82],
    }
)  # fmt: skip


def test_a_loss_is_named_with_its_settings() -> None:
    settings = staleness.settings_of("dapo:dual_clip=3,learning_rate=1e-4")
    assert (settings.loss.name, settings.loss.dual_clip, settings.learning_rate) == ("dapo", 3, 1e-4)
    assert staleness.settings_of("dppo:divergence=kl").loss.divergence == "kl"
    assert staleness.settings_of("decoupled_ppo").minibatches == 2
    with pytest.raises(argparse.ArgumentTypeError, match="dual_clip does not apply"):
        staleness.loss_name("grpo:dual_clip=3")
    assert [staleness.loss_name(loss) for loss in staleness.LOSSES] == list(staleness.LOSSES)


def test_intervals_and_ratios_are_those_by_hand() -> None:
    first = ROWS[0]
    half = 12.7062 * 0.0707107 / 2**0.5  # t for one degree of freedom · s ÷ √n
    assert (first["reward"], first["low"]) == pytest.approx((0.85, 0.85 - half), rel=1e-4)
    assert f"| `{DEFAULT}` | 0.850 ± {half:.3f} | 0.720 ± " in staleness.table(ROWS)
    assert rows_of({("0", OTHER): [0.5]})[0]["high"] is None
    assert staleness.default_vs_best(ROWS) == pytest.approx(0.72 / 0.8)
    kept = staleness.gains_kept(ROWS, 0.4, "8")
    assert kept == pytest.approx({DEFAULT: 0.0, OTHER: 0.41 / 0.5})


def test_the_keys_are_checked_where_their_cells_were_measured() -> None:
    cell = staleness.Cell("2", DEFAULT, 0)
    found = {cell: {"staleness_max": 2, "steps": 9, "logprob_max_error": 1e-6}}
    both = {check.name: check.value for check in staleness.checks_of(ROWS, 0.4, found)}
    assert both["default_vs_best_at_default_bound"] == pytest.approx(0.9)
    assert both["gain_kept_at_staleness_8"] == pytest.approx(0.82)
    only = {check.name for check in staleness.checks_of(ROWS[:1], 0.4, found)}
    assert only == {"staleness_is_the_bound", "logprob_max_error"}

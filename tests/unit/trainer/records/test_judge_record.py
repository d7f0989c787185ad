"""A judge's costs in the metrics, and its agreement with the verifier."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.unit.trainer.learning_fixtures import make_trajectory, make_turn
from tidegate.trainer.records.judge import WINDOW, JudgeRecord, somers_d
from tidegate.trainer.records.recorder import custom_metrics
from tidegate.types import Trajectory


def episode(judge: float, own: float | None = None, **costs: float) -> Trajectory:
    made = make_trajectory([make_turn(0, None, [1], [2])])
    made.reward, made.reward_parts = judge, {"judge": judge}
    made.metrics = {f"judge/{name}": value for name, value in costs.items()}
    if own is not None:
        made.metrics["judge/environment"] = own
    return made


def test_costs_are_summed_since_the_last_line() -> None:
    record = JudgeRecord()
    assert record.metrics() == {}, "there is no judge"
    record.add([episode(0.5, calls=2, errors=1, prompt_tokens=20, completion_tokens=6, seconds=3.0)])
    failed = episode(0.5, calls=3, errors=3, seconds=1.0)
    failed.reward, failed.reward_parts = None, {}
    record.add([failed, episode(0.5, cached=1, seconds=0.5)])
    assert record.metrics() == {
        "judge/calls": 5, "judge/cached": 1, "judge/errors": 4, "judge/prompt_tokens": 20,
        "judge/completion_tokens": 6, "time/judge": 1.5,
    }  # fmt: skip
    assert record.metrics() == {}


def test_the_costs_are_no_metrics_of_an_episode() -> None:
    assert list(custom_metrics([episode(0.5, 1.0, calls=1)])) == ["reward/judge"]


def test_a_judge_that_agrees_does_not_diverge() -> None:
    record, rng = JudgeRecord(), random.Random(0)
    for phase in range(10):
        own = [float(rng.random() < 0.5 + phase / 25) for _ in range(WINDOW // 4)]
        record.add(episode(abs(one - (rng.random() < 0.1)), one, seconds=1.0) for one in own)
        metrics = record.metrics()
        assert metrics["judge/agreement"] > 0.6
        assert metrics["judge/diverging"] == 0.0


def test_the_agreement_is_that_of_the_newest_episodes() -> None:
    record, rng = JudgeRecord(), random.Random(0)
    for phase in range(8):
        for _ in range(WINDOW // 2):
            own = float(rng.random() < 0.5)
            record.add([episode(own if phase < 3 else rng.random(), own, seconds=1.0)])
        metrics = record.metrics()
    assert metrics["judge/agreement"] < 0.3


def test_a_judge_that_rises_while_the_verifier_falls_diverges() -> None:
    record, rng = JudgeRecord(), random.Random(0)
    for number in range(WINDOW):
        good = rng.random() < 1 - number / WINDOW
        record.add([episode(min(1.0, 0.3 * good + number / WINDOW), float(good), seconds=1.0)])
    assert record.metrics()["judge/diverging"] == 1.0


def test_few_episodes_or_equal_ones_are_not_compared() -> None:
    record = JudgeRecord()
    record.add(episode(0.5, float(n % 2), seconds=1.0) for n in range(10))
    assert "judge/agreement" not in record.metrics()
    record.add(episode(0.5, float(n % 2), seconds=1.0) for n in range(WINDOW))
    assert record.metrics()["judge/agreement"] == 0.0, "a constant orders nothing"
    record.add(episode(0.5, float(n > 8), seconds=1.0) for n in range(WINDOW))
    assert "judge/agreement" not in record.metrics(), "the environment's reward hardly varies"


def test_the_agreement_does_not_depend_on_how_frequent_a_reward_is() -> None:
    def noisy(good: int, bad: int) -> float:
        rewards = np.repeat([1.0, 0.0], [good, bad])
        wrong = np.concatenate([np.arange(good) % 10 == 0, np.arange(bad) % 10 == 0])
        return somers_d(abs(rewards - wrong), rewards)

    assert noisy(100, 100) == pytest.approx(0.8)
    assert noisy(1000, 20) == pytest.approx(0.8)
    with pytest.raises(ValueError, match="equal rewards"):
        somers_d(np.ones(3), np.ones(3))

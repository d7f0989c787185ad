"""The error rates of the sequential test, and its bounds for few and for equal rewards."""

from __future__ import annotations

import math
import random

import pytest

from tidegate.gateway.client import GroupRow
from tidegate.trainer.publish.canary import CanaryTest
from tidegate.trainer.publish.sequential_test import ALPHA, LEAST, compare

MARGIN = 0.1


def result(candidate: float, live: float, seed: int, share: float = 0.5, most: int = 3000) -> bool | None:
    """The test's result for 0/1 rewards with these means, looked at after every 20 rewards."""
    rng = random.Random(seed)
    rewards: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(most // 20):
        for _ in range(20):
            arm = rng.random() < share
            rewards[arm].append(float(rng.random() < (candidate if arm else live)))
        promoted = compare(rewards[True], rewards[False], MARGIN).promotes(MARGIN)
        if promoted is not None:
            return promoted
    return None


@pytest.mark.parametrize(
    ("candidate", "live", "wanted"),
    [(0.6, 0.6, True), (0.95, 0.95, True), (0.6, 0.45, True), (0.45, 0.6, False), (0.7, 0.95, False)],
)
def test_a_worse_candidate_is_rolled_back_and_a_good_one_is_promoted(
    candidate: float, live: float, wanted: bool
) -> None:
    results = [result(candidate, live, seed) for seed in range(100)]
    assert results.count(not wanted) <= 100 * 3 * ALPHA
    assert results.count(wanted) >= 95


def test_a_candidate_at_the_margin_is_rarely_promoted_however_often_one_looks() -> None:
    results = [result(0.5, 0.5 + MARGIN, seed) for seed in range(100)]
    assert results.count(True) <= 100 * 3 * ALPHA


def test_few_rewards_decide_nothing_and_neither_do_a_few_equal_ones() -> None:
    few = compare([1.0] * (LEAST - 1), [0.0] * 500, MARGIN)
    assert math.isinf(few.low)
    assert few.promotes(MARGIN) is None
    equal = compare([1.0] * LEAST, [1.0] * LEAST, MARGIN)
    assert equal.promotes(MARGIN) is None, "twenty right answers do not show that all are right"
    assert compare([1.0] * 300, [1.0] * 300, MARGIN).promotes(MARGIN) is True
    assert compare([0.37] * LEAST, [0.37] * LEAST, MARGIN).promotes(MARGIN) is True


def test_the_bounds_are_those_of_the_formula() -> None:
    candidate, live = [0.0, 1.0] * 50, [1.0, 1.0, 0.0, 1.0] * 50
    got = compare(candidate, live, MARGIN)

    def variance(values: list[float]) -> float:
        padded = [*values, 0.0, 1.0]
        mean = sum(padded) / len(padded)
        return sum((value - mean) ** 2 for value in padded) / (len(padded) - 1) / len(values)

    w, t = variance(candidate) + variance(live), MARGIN**2
    half = math.sqrt(2 * w * (w + t) / t * math.log(math.sqrt((w + t) / w) / (2 * ALPHA)))
    assert got.low == pytest.approx(-0.25 - half)
    assert got.high == pytest.approx(-0.25 + half)


def test_only_conversations_of_one_version_that_began_since_count() -> None:
    test = CanaryTest(7, {"old"})

    def row(name: str, oldest: int | None, newest: int | None, reward: float | None) -> GroupRow:
        return GroupRow(name, "ready", oldest, [name], newest_version=newest, reward=reward)

    rows = [
        row("old", 7, 7, 1.0), row("candidate", 7, 7, 1.0), row("mixed", 6, 7, 1.0), row("live", 6, 6, 0.0),
        row("open", 7, None, None), row("other", 5, 6, 0.5),
    ]  # fmt: skip
    test.add(rows)
    test.add(rows)  # listed again
    got = test.compare(MARGIN)
    assert (got.episodes, got.reward) == (1, 1.0)
    assert (got.live_episodes, got.live_reward) == (2, 0.25)

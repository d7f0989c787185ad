"""pass@k and intervals against plain references, and the statistics of a set."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.evaluation.results import EvalResults
from tidegate.evaluation.sampler import SampledEpisode, failed
from tidegate.evaluation.stats import estimate, pass_at_k, student, wilson
from tidegate.types import Outcome, Task, Trajectory


@given(st.data())
def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_one(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 8))
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    draws = list(combinations([1] * c + [0] * (n - c), k))
    share = Fraction(sum(any(draw) for draw in draws), len(draws))
    assert pass_at_k(n, c, k) == pytest.approx(float(share), abs=1e-12)


def test_pass_at_k_holds_for_many_samples() -> None:
    assert pass_at_k(1000, 3, 100) == pytest.approx(float(1 - Fraction(comb(997, 100), comb(1000, 100))))
    assert pass_at_k(4, 1, 1) == pytest.approx(0.25)
    assert (pass_at_k(4, 0, 4), pass_at_k(4, 1, 4)) == (0.0, 1.0)


@pytest.mark.parametrize("case", [(4, 1, 5), (4, 5, 1), (4, -1, 1), (4, 1, 0)])
def test_pass_at_k_refuses_what_cannot_be(case: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="cannot be estimated"):
        pass_at_k(*case)


def test_wilsons_interval_is_the_published_one() -> None:
    """The ends solve (p̂ − p)² = z² p (1 − p) / n, which is how Wilson defines them."""
    for right, total in [(0, 10), (3, 10), (10, 10), (412, 1319)]:
        for end in wilson(right, total):
            if 0 < end < 1:
                left = (right / total - end) ** 2
                assert left == pytest.approx(1.959963984540054**2 * end * (1 - end) / total)
    assert wilson(0, 10)[0] == pytest.approx(0.0)
    assert wilson(10, 10)[1] == pytest.approx(1.0)
    assert wilson(0, 10)[1] == pytest.approx(0.2775, abs=1e-4)


def test_the_kind_of_interval_is_stated() -> None:
    shares = estimate([1.0, 0.0, 1.0, 1.0])
    assert (shares.mean, shares.method, shares.tasks) == (0.75, "Wilson score interval", 4)
    means = estimate([0.5, 0.25, 1.0])
    assert means.method.startswith("bootstrap over tasks")
    assert means.low < means.mean < means.high
    with pytest.raises(ValueError, match="without values"):
        estimate([])


def test_the_bootstrap_covers_the_mean_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(7)
    covered = 0
    for _ in range(100):
        found = estimate(rng.beta(2, 3, 60).tolist())
        covered += found.low <= 0.4 <= found.high
    assert 88 <= covered < 100


def episode(task: str, sample: int, reward: float | None, **more: object) -> SampledEpisode:
    one = Task(task, "sums", [])
    if reward is None:
        return SampledEpisode("", one, sample, failed(one, Outcome.AGENT_ERROR, "it broke"))
    trajectory = Trajectory("s", task, "sums", "eval", Outcome.COMPLETED, [], reward=reward)
    trajectory.reward_parts = {"exact": reward}
    trajectory.metrics = {"turns": 2.0, **more}  # type: ignore[dict-item]
    return SampledEpisode("", one, sample, trajectory)


def test_a_sets_numbers() -> None:
    tally = EvalResults(threshold=1.0, ks=[1, 2])
    for one in [episode("a", 0, 1.0), episode("a", 1, 0.0), episode("b", 0, 0.5), episode("b", 1, None)]:
        tally.add(one)
    found = tally.summary("")
    assert (found["tasks"], found["episodes"], found["failed"]) == (2, 4, 1)
    assert found["outcomes"] == {"completed": 3, "agent_error": 1}
    assert found["reward"]["mean"] == 0.5
    assert found["reward_if_failures_were_0"] == pytest.approx((0.5 + 0.25) / 2)
    assert found["pass"]["1"]["mean"] == pytest.approx(0.25)
    assert (found["pass"]["2"]["mean"], found["pass"]["2"]["tasks"]) == (1.0, 1), (
        "b has one graded sample only"
    )
    assert found["metrics"] == {"turns": 2.0}
    assert "reward_by_env" not in found


def test_a_set_in_which_everything_failed_has_no_mean() -> None:
    tally = EvalResults(threshold=1.0, ks=[1])
    tally.add(episode("a", 0, None))
    assert tally.summary("") == {"tasks": 1, "episodes": 1, "failed": 1, "outcomes": {"agent_error": 1}}


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (5, 2.5706), (10, 2.2281), (30, 2.0423), (1000, 1.9623)],
)
def test_students_interval_has_the_quantiles_of_the_tables(degrees: int, quantile: float) -> None:
    low, high = student(5.0, 4.0, degrees + 1)
    assert high - 5.0 == pytest.approx(quantile * 2.0 / (degrees + 1) ** 0.5, rel=0.01)
    assert low + high == pytest.approx(10.0)


def test_one_value_has_no_variance() -> None:
    with pytest.raises(ValueError, match="1 values have no variance"):
        student(1.0, 0.0, 1)

"""Rewards: their parameters and return values, and extraction of numbers from answers."""

from __future__ import annotations

import time
from fractions import Fraction
from functools import partial

import pytest

from tidegate.envs.rewards import Reward, exact_answer, final_number, weighted
from tidegate.errors import ConfigError, RewardError

GIVEN = {"output": "o", "answer": 4, "info": {"x": 1}, "task": None, "messages": [], "trajectory": None}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 42", "42"),
        ("####42", "42"),
        ("so it is\n#### 42.\nThanks", "42"),
        ("#### 1\n#### 2", "2"),
        ("#### 2\n#### none", "2"),
        ("#### - 3", "-3"),
        ("#### .5", "0.5"),
        ("#### 42 apples", "42"),
        ("#### 1e5", "100000"),
        ("#### forty-two", None),
        ("42", None),
        ("#### ", None),
        ("", None),
        (None, None),
        ("#### ٤٢", None),
        (f"#### {'9' * 60}.1", "9" * 60 + ".1"),
    ],
)
def test_the_last_stated_number_counts(text: str | None, number: str | None) -> None:
    assert final_number(text) == (None if number is None else Fraction(number))


def test_numbers_are_compared_exactly() -> None:
    assert exact_answer("#### 0.30", "#### 0.3") == 1.0
    assert exact_answer("#### 0.30000000000000001", "#### 0.3") == 0.0
    assert exact_answer("#### 100000000000000000000001", "#### 100000000000000000000000") == 0.0
    assert exact_answer(None, "#### 1") == 0.0


def test_an_answer_may_be_the_number_alone() -> None:
    assert exact_answer("#### 12", "12") == exact_answer("#### 12.0", 12) == 1.0
    assert exact_answer("12", "12") == 0.0
    assert [exact_answer(f"#### {n}", ["3", "#### 5"]) for n in (3, 5, 4)] == [1.0, 1.0, 0.0]
    with pytest.raises(RewardError, match="'many' is not one number"):
        exact_answer("#### 12", "many")


def test_a_long_answer_takes_no_long_time() -> None:
    began = time.process_time()
    assert final_number("#### " + "1," * 200_000) is None
    assert final_number("####" * 50_000 + " " * 50_000 + "$" + " " * 50_000) is None
    assert final_number("#### " + "1" * 200_000 + "/2") is None
    assert time.process_time() - began < 2.0


def test_arguments_are_injected_by_name() -> None:
    assert Reward("r", lambda answer, info: answer + info["x"])(GIVEN) == 5.0
    assert Reward("r", lambda: True)(GIVEN) == 1.0
    assert Reward("r", lambda output, scale=3: len(output) * scale)(GIVEN) == 3.0
    assert Reward("r", lambda *args, **more: len(args) + len(more))(GIVEN) == 0.0


async def _double(output: str, factor: int = 2) -> float:
    return float(len(output) * factor)


class _Judge:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    async def __call__(self, output: str) -> float:
        return float(len(output) * self.factor)

    @staticmethod
    async def static(output: str) -> float:
        return float(len(output))


@pytest.mark.parametrize(
    ("fn", "factor"),
    [
        (_double, 2),
        (_Judge(3), 3),
        (_Judge.__dict__["static"], 1),  # as in a class body that lists its rewards
        (partial(_double, factor=4), 4),
        (partial(_Judge(5)), 5),
    ],
    ids=["function", "object", "static method", "partial", "partial of an object"],
)
async def test_whatever_is_async_is_awaited(fn, factor) -> None:
    reward = Reward("r", fn)
    assert reward.is_async
    assert (await reward.grade_async(GIVEN)).value == len(GIVEN["output"]) * factor


def test_what_is_not_async_is_not_awaited() -> None:
    assert not any(
        Reward("r", fn).is_async for fn in (lambda: 1, partial(lambda: 1), staticmethod(lambda: 1))
    )


@pytest.mark.parametrize("fn", [lambda response: 1, lambda output, *, ground_truth: 1])
def test_asking_for_another_name_is_refused_at_once(fn) -> None:
    with pytest.raises(ConfigError, match="may have output, answer, info, task, messages, trajectory"):
        Reward("r", fn)


def test_a_weight_is_finite() -> None:
    with pytest.raises(ConfigError, match="weight"):
        Reward("r", lambda: 1, weight=float("nan"))


def test_a_part_that_names_a_policy_counts_for_it_alone() -> None:
    form = Reward("form", lambda: 0.0, weight=0.5)
    exact = Reward("exact", lambda: 0.0, policy="solver")
    judged = [Reward(name, lambda: 0.0, 2.0, policy="verifier") for name in ("judged", "calm")]
    parts = {"form": 1.0, "exact": 0.25, "judged": 0.5, "calm": -0.125}
    assert weighted([form, exact, *judged], parts) == (0.5, {"solver": 0.75, "verifier": 1.25})
    assert weighted([exact, *judged], parts) == (0.5, {"solver": 0.25, "verifier": 0.75}), "the mean"
    assert weighted([form], parts) == (0.5, {})
    assert weighted([], {}) == (0, {})

"""Values that reward functions, agents and clients return as rewards and metrics."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.envs.test_rewards import GIVEN
from tidegate.envs.rewards import Grade, Reward
from tidegate.envs.service.frames import pack
from tidegate.envs.service.scoring import check
from tidegate.errors import RewardError
from tidegate.types import Scored, finite

NUMBERS = [
    (np.float64(0.5), 0.5), (np.float32(0.5), 0.5), (np.float16(0.5), 0.5), (np.int64(1), 1.0),
    (np.uint8(3), 3.0), (np.isclose(1.0, 1.0), 1.0), (np.bool_(False), 0.0), (np.array(0.25), 0.25),
    (torch.tensor(0.5), 0.5), (torch.tensor(True), 1.0), (True, 1.0), (Decimal("0.5"), 0.5),
    (Fraction(1, 4), 0.25),
]  # fmt: skip
OTHERS: list[Any] = [
    np.float32("nan"), np.array([0.5]), np.complex64(1), np.datetime64("2024-01-01"), np.str_("1"),
    torch.tensor(float("inf")), Decimal("NaN"), Decimal("sNaN"), 10**400, "1", None, 1 + 0j, [1],
]  # fmt: skip


@pytest.mark.parametrize(("value", "number"), NUMBERS)
def test_a_scalar_of_any_numeric_type_is_taken_at_its_value(value: Any, number: float) -> None:
    """Farama-Foundation/Gymnasium#1621, #1341; rllm-org/rllm#281."""
    assert Reward("r", lambda: value).grade(GIVEN).value == number
    assert Reward("r", lambda: Grade(1, {"m": value})).grade(GIVEN) == Grade(1.0, {"m": number})
    assert type(finite("x", value)) is float
    assert finite("x", value) == number


@pytest.mark.parametrize("value", OTHERS)
def test_a_value_that_is_no_finite_number_is_named(value: Any) -> None:
    """Farama-Foundation/Gymnasium#1621: the siblings that must stay refused."""
    with pytest.raises(RewardError, match=r"^x is .*, not a finite number$"):
        finite("x", value)
    with pytest.raises(RewardError, match="its metric 'm' is"):
        Reward("r", lambda: Grade(1, {"m": value})).grade(GIVEN)


def test_an_environments_own_score_of_numpys_numbers_can_be_sent() -> None:
    """rllm-org/rllm#281: numpy's numbers cannot be encoded."""
    half = np.float32(0.5)
    scored = check(Scored(half, {"p": half}, {"m": half}, {np.int64(2): half}))  # type: ignore[arg-type, dict-item]
    assert scored == Scored(0.5, {"p": 0.5}, {"m": 0.5}, {2: 0.5})
    pack({"parts": dict(scored.parts), "metrics": dict(scored.metrics), "turns": dict(scored.turn_rewards)})


def test_a_name_that_is_not_a_text_is_refused() -> None:
    """The names 1 and "1" were one metric, with the last value."""
    message = "metric 1 has a name that is not a text; write '1'"
    with pytest.raises(RewardError, match=f"its {message}"):
        Reward("r", lambda: Grade(1, {"1": 0, 1: 1})).grade(GIVEN)  # type: ignore[dict-item]
    with pytest.raises(RewardError, match=f"the {message}"):
        check(Scored(1.0, {}, {1: 1.0}))  # type: ignore[dict-item]
    with pytest.raises(RewardError, match="the reward None has a name that is not a text"):
        check(Scored(1.0, {None: 1.0}))  # type: ignore[dict-item]

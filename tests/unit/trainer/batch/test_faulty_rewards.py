"""Finite rewards whose sums or squares no float holds: only their own groups are left out of a batch."""

from __future__ import annotations

import math

import pytest

from tests.unit.trainer.batch.test_credit import episode, group
from tidegate.trainer.batch.credit import faulty_reward
from tidegate.types import Group


@pytest.mark.parametrize(
    ("reward", "of_turn"),
    [(1e308, 1e308), (1e200, 0), (-1e16, 0), (1e308, -1e308), (math.inf, 0), (math.nan, 0), (0, 1e200)],
)
def test_a_reward_beyond_what_a_step_can_hold_is_named(reward: float, of_turn: float) -> None:
    faulty = group(episode(0), episode(reward, (of_turn,)))
    assert "add up to" in (faulty_reward(faulty) or "")


def test_large_rewards_within_bounds_are_trained_on() -> None:
    fine: Group = group(episode(-1e6), episode(1e6, (1.0, -2.0)))
    assert faulty_reward(fine) is None

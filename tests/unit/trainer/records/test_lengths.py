"""Lengths, cut episodes and repetition of a batch's sampled tokens, against values computed by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.trainer.learning_fixtures import make_trajectory, make_turn
from tests.unit.trainer.records.test_recorder import batch, recorder
from tidegate.trainer.ledger.entries import State
from tidegate.trainer.records.recorder import cut_ratio, length_metrics, repeated_share, repetition_metrics
from tidegate.types import Group, Trajectory


def sampled(*replies: list[int], prompt: int = 1) -> Trajectory:
    """An episode whose turns follow one another."""
    turns = [
        make_turn(index, index - 1 if index else None, [prompt], reply, version=1)
        for index, reply in enumerate(replies)
    ]
    return make_trajectory(turns)


@pytest.mark.parametrize(
    ("replies", "share"),
    [
        ([[1, 2, 3, 4]], 0.0),
        # 1234, 2341, 3412, 4123, 1234: the last one occurred before.
        ([[1, 2, 3, 4, 1, 2, 3, 4]], 1 / 5),
        ([[7] * 10], 6 / 7),
        # 5678 once in each of three replies; the 4-gram 6785 would reach from one reply into the next.
        ([[5, 6, 7, 8]] * 3, 2 / 3),
        ([[5, 6, 7, 8], [5, 6, 7], [9, 5, 6, 7, 8]], 1 / 3),
        # Ids above 2^16, which differ in one position each.
        ([[151_643, 2, 3, 4], [151_644, 2, 3, 4], [151_643, 2, 3, 5], [151_643, 2, 0, 4]], 0.0),
    ],
)
def test_the_repeated_share_of_an_episode(replies: list[list[int]], share: float) -> None:
    assert repeated_share(sampled(*replies)) == pytest.approx(share, abs=1e-15)


def test_replies_that_are_not_trained_on_and_prompts_repeat_nothing() -> None:
    told = sampled([1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4])
    told.turns[1].delivered, told.turns[2].exempt = False, "header"
    assert repeated_share(told) == 0.0
    prompted = make_trajectory([make_turn(0, None, [9] * 20, [1, 2, 3, 4])])
    assert repeated_share(prompted) == 0.0
    assert repeated_share(sampled([1, 2, 3], [])) is None


def test_repetition_of_a_batch_leaves_short_episodes_out() -> None:
    found = repetition_metrics([sampled([7] * 10), sampled([1, 2, 3, 4, 1, 2, 3, 4]), sampled([1])])
    assert found == {
        "repetition/mean": pytest.approx((6 / 7 + 1 / 5) / 2),
        "repetition/max": pytest.approx(6 / 7),
    }
    assert repetition_metrics([sampled([1])]) == {}


def test_length_quantiles_are_interpolated() -> None:
    """Lengths 10, 20, 30, 40: the median lies in the middle, the 95th percentile at 30 + 0.85 · 10."""
    found = length_metrics(
        [sampled([1] * 10), sampled([1] * 40), sampled([1] * 15, [1] * 15), sampled([1] * 20)]
    )
    assert found == {
        "tokens/sampled": 100, "length/mean": 25, "length/p50": 25, "length/p95": pytest.approx(38.5),
        "length/max": 40,
    }  # fmt: skip
    assert length_metrics([]) == {}


def test_cut_episodes_are_those_whose_last_delivered_reply_was_cut() -> None:
    whole, cut, earlier, lost = (sampled([1], [2]) for _ in range(4))
    cut.turns[1].finish_reason = "length"
    earlier.turns[0].finish_reason = "length"
    lost.turns[0].finish_reason, lost.turns[1].delivered = "length", False
    assert cut_ratio([whole, cut, earlier, lost]) == 0.5
    assert cut_ratio([]) == 0.0


def test_a_step_counts_dropped_episodes_as_cut_and_repeated_but_not_in_lengths(tmp_path: Path) -> None:
    trained, dropped = sampled([1, 2, 3, 4]), sampled([7] * 8)
    dropped.turns[0].finish_reason = "length"
    step = batch(trained)
    step.dropped.append((Group("g2", "t2", [dropped]), State.FILTERED))
    found = recorder(tmp_path, []).batch_metrics(step, 1)
    assert (found["length/cut_ratio"], found["truncated_ratio"]) == (0.5, 0)
    assert (found["repetition/mean"], found["repetition/max"]) == (0.4, 0.8)
    assert (found["length/p95"], found["tokens/sampled"]) == (4, 4)

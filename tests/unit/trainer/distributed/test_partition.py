"""Partition of rows among ranks: each row once, in passes of similar size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.trainer.learning_fixtures import make_rows
from tidegate.trainer.batch.rows import TrainingSequence
from tidegate.trainer.batch.share import RankShare, partition_rows, split_share


def positions(rows: list[TrainingSequence], hand: list[int]) -> int:
    """Of a pass, with padding."""
    return len(hand) * max((rows[index].inputs for index in hand), default=0)


@given(number=st.integers(1, 40), ranks=st.integers(1, 5), max_tokens=st.sampled_from([64, 200, 8192]))
def test_each_row_is_assigned_to_one_rank_and_none_gets_too_many(number, ranks, max_tokens):
    rows = make_rows(number, seed=number)
    rows[0].mask[:] = False
    dealt = partition_rows(rows, ranks, max_tokens)
    assert len({len(hands) for hands in dealt}) == 1
    held = [index for hands in dealt for hand in hands for index in hand]
    assert sorted(held) == list(range(1, number))
    for hand in (hand for hands in dealt for hand in hands):
        assert positions(rows, hand) <= max_tokens or len(hand) == 1
    shares = split_share(RankShare(rows, frozenset(), 0, 0.0), ranks, max_tokens)
    for share, hands in zip(shares, dealt, strict=True):
        assert share.passes == [len(hand) for hand in hands]
        assert [id(row) for row in share.rows] == [id(rows[index]) for hand in hands for index in hand]


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_ranks_compute_at_the_same_time_is_of_like_size(ranks):
    rows = make_rows(64, seed=1, shortest=20, longest=400)
    dealt = partition_rows(rows, ranks, 2048)
    passes = np.array([[positions(rows, hand) for hand in hands] for hands in dealt])
    slowest, mean = passes.max(axis=0).sum(), passes.mean(axis=0).sum()
    assert passes.shape[1] > 1
    assert slowest <= 1.05 * mean


def test_fewer_rows_than_ranks_leave_a_rank_without_rows():
    dealt = partition_rows(make_rows(3), 4, 8192)
    assert [[len(hand) for hand in hands] for hands in dealt] == [[1], [1], [1], [0]]

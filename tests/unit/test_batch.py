import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.errors import TrainingError
from tidegate.trainer.batch import _cuts, microbatches, padding_ratio, rows_of
from tidegate.types import Trajectory

from .learning_fixtures import make_row, make_rows, make_trajectory, make_turn, trees


def trainable_tokens(trajectory: Trajectory) -> dict[int, tuple[int, float]]:
    """By definition: id → (version, temperature) of all delivered tokens that were not forced."""
    found = {}
    for turn in trajectory.delivered_turns():
        mask = np.ones(len(turn.output_ids)) if turn.output_mask is None else turn.output_mask
        for token, version, free in zip(turn.output_ids, turn.token_versions(), mask, strict=True):
            if free:
                found[int(token)] = (int(version), turn.temperature)
    return found


@given(trees())
def test_every_delivered_token_is_trained_exactly_once(trajectory):
    rows = rows_of(trajectory, 0.5)
    trained = [int(token) for row in rows for token in row.ids[row.mask]]
    assert sorted(trained) == sorted(trainable_tokens(trajectory))


@given(trees())
def test_rows_are_whole_paths(trajectory):
    paths = {
        tuple(np.concatenate([trajectory.prompt_ids(turn), turn.output_ids]).tolist())
        for turn in trajectory.delivered_turns()
    }
    rows = [tuple(row.ids.tolist()) for row in rows_of(trajectory, 0.5)]
    assert set(rows) <= paths
    assert len(set(rows)) == len(rows)
    for one, other in itertools.permutations(rows, 2):
        assert one != other[: len(one)], "a row that is another's beginning is computed for nothing"


@given(trees())
def test_what_was_recorded_stays_with_its_token(trajectory):
    expected = trainable_tokens(trajectory)
    for row in rows_of(trajectory, -2.0):
        assert (row.advantage, row.weight, row.group_id, row.session_id) == (-2.0, 1.0, "g1", "s1")
        np.testing.assert_allclose(row.logprobs, np.where(row.mask, row.ids / -1000, 0), rtol=1e-6)
        for token, free, version, temperature in zip(
            row.ids, row.mask, row.versions, row.temperature, strict=True
        ):
            assert (version, temperature) == (expected[int(token)] if free else (-1, 1.0))


def test_a_conversation_is_one_row():
    turns = [make_turn(0, None, [1, 2], [3, 4]), make_turn(1, 0, [5], [6]), make_turn(2, 1, [7, 8], [9])]
    (row,) = rows_of(make_trajectory(turns), 1.0)
    assert row.ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert row.mask.astype(int).tolist() == [0, 0, 1, 1, 0, 1, 0, 0, 1]
    assert row.trained == 4
    assert row.inputs == 8


def test_a_shared_reply_is_trained_in_the_first_branch():
    turns = [make_turn(0, None, [1], [2]), make_turn(1, 0, [3], [4]), make_turn(2, 0, [5], [6])]
    first, second = rows_of(make_trajectory(turns), 1.0)
    assert (first.ids.tolist(), first.ids[first.mask].tolist()) == ([1, 2, 3, 4], [2, 4])
    assert (second.ids.tolist(), second.ids[second.mask].tolist()) == ([1, 2, 5, 6], [6])


def test_undelivered_turns_are_context_at_most():
    turns = [
        make_turn(0, None, [1], [2]),
        make_turn(1, 0, [3], [4], delivered=False),
        make_turn(2, 1, [5], [6]),
        make_turn(3, 2, [7], [8], delivered=False),
    ]
    (row,) = rows_of(make_trajectory(turns), 1.0)
    assert row.ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert row.ids[row.mask].tolist() == [2, 6]


def test_nothing_to_train_gives_no_rows():
    assert rows_of(make_trajectory([]), 1.0) == []
    assert rows_of(make_trajectory([make_turn(0, None, [1], [2], delivered=False)]), 1.0) == []
    assert rows_of(make_trajectory([make_turn(0, None, [1], [])]), 1.0) == []


def test_a_branch_that_only_repeats_is_left_out():
    turns = [make_turn(0, None, [1], [2]), make_turn(1, 0, [3], [4]), make_turn(2, 0, [5], [])]
    assert len(rows_of(make_trajectory(turns), 1.0)) == 1


def test_wrong_records_are_refused_by_name():
    turn = make_turn(3, None, [1], [2, 3])
    turn.logprobs = turn.logprobs[:1]
    with pytest.raises(TrainingError, match="session s1, turn 3: 2 output tokens, but 1 logprobs"):
        rows_of(make_trajectory([turn]), 1.0)
    with pytest.raises(TrainingError, match="prompt is empty"):
        rows_of(make_trajectory([make_turn(0, None, [], [2])]), 1.0)


@given(st.integers(0, 12), st.integers(0, 2**32), st.integers(8, 200), st.integers(0, 300))
def test_microbatches_hold_each_row_once(number, seed, max_tokens, overhead):
    rows = make_rows(number, seed)
    batches = microbatches(rows, max_tokens, overhead=overhead)
    assert sorted(index for batch in batches for index in batch.rows) == list(range(number))
    for batch in batches:
        assert batch.ids_bt.numel() <= max_tokens or len(batch.rows) == 1
        assert batch.ids_bt.shape == (len(batch.rows), int(batch.lengths_b.max()))
        assert (batch.positions_bt == batch.positions_bt[0]).all()
        assert batch.positions_bt[0].tolist() == list(range(batch.ids_bt.shape[1]))
        for at, index in enumerate(batch.rows):
            row, here = rows[index], batch.row_n == at
            positions = np.flatnonzero(row.mask)
            width = batch.ids_bt.shape[1]
            assert batch.ids_bt[at, : row.inputs].tolist() == row.ids[: row.inputs].tolist()
            assert not batch.ids_bt[at, row.inputs :].any()
            assert batch.at_n[here].tolist() == (at * width + positions - 1).tolist()
            assert batch.targets_n[here].tolist() == row.ids[row.mask].tolist()
            assert batch.logprobs_n[here].tolist() == row.logprobs[row.mask].tolist()
            assert batch.versions_n[here].tolist() == row.versions[row.mask].tolist()
            assert batch.temperatures_n[here].tolist() == row.temperature[row.mask].tolist()
            assert set(batch.advantages_n[here].tolist()) == {np.float32(row.advantage)}
            assert set(batch.weights_n[here].tolist()) == {1.0}


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=7).map(lambda lengths: sorted(lengths, reverse=True)),
    st.integers(1, 90),
    st.integers(0, 60),
)
def test_the_cut_is_the_cheapest(lengths, max_tokens, overhead):
    def cost(cuts):
        runs = [lengths[start:end] for start, end in cuts]
        if any(len(run) > 1 and len(run) * run[0] > max_tokens for run in runs):
            return float("inf")
        return sum(len(run) * run[0] + overhead for run in runs)

    count = len(lengths)
    inner = range(1, count)
    every = (
        list(itertools.pairwise((0, *chosen, count)))
        for size in range(count)
        for chosen in itertools.combinations(inner, size)
    )
    cuts = _cuts(lengths, max_tokens, overhead)
    assert [one for start, end in cuts for one in range(start, end)] == list(range(count))
    assert cost(cuts) == min(map(cost, every))


def test_padding_of_typical_rows_is_little():
    rng = np.random.default_rng(0)
    rows = [make_row(rng, shortest=60, longest=180) for _ in range(128)]
    assert padding_ratio(microbatches(rows, 8192)) <= 0.05
    heavy = [make_row(rng, shortest=100, longest=int(rng.choice([150, 400, 2000]))) for _ in range(128)]
    assert padding_ratio(microbatches(heavy, 8192)) <= 0.05
    assert padding_ratio([]) == 0.0


def test_rows_without_trained_tokens_are_left_out():
    rows = make_rows(3)
    rows[1].mask[:] = False
    assert sorted(index for batch in microbatches(rows, 4096) for index in batch.rows) == [0, 2]


def test_a_row_longer_than_a_microbatch_goes_alone():
    rng = np.random.default_rng(0)
    rows = [make_row(rng, shortest=90, longest=90), *(make_row(rng, shortest=8, longest=8) for _ in range(4))]
    layout = sorted(sorted(batch.rows) for batch in microbatches(rows, 64))
    assert layout[0] == [0]
    assert layout[1] == [1, 2, 3, 4]

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from tests.unit.trainer.learning_fixtures import make_trajectory, make_turn, trees
from tidegate.errors import TrainingError
from tidegate.trainer.batch.microbatch import microbatch
from tidegate.trainer.batch.rows import check_listed, rows_of
from tidegate.turn import VersionSpan
from tidegate.types import Trajectory


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
        assert (row.weight, row.group_id, row.session_id) == (1.0, "g1", "s1")
        assert row.advantages.tolist() == np.where(row.mask, -2.0, 0.0).tolist()
        np.testing.assert_allclose(row.logprobs, np.where(row.mask, row.ids / -1000, 0), rtol=1e-6)
        for token, free, version, temperature in zip(
            row.ids, row.mask, row.versions, row.temperature, strict=True
        ):
            assert (version, temperature) == (expected[int(token)] if free else (-1, 1.0))


def test_likeliest_ids_stay_with_their_token():
    """Also where one turn has fewer: each token keeps as many."""
    turns = [make_turn(0, None, [1, 2], [3, 4]), make_turn(1, 0, [5], [6])]
    turns[0].top_ids, turns[1].top_ids = np.arange(6, dtype=np.int32), np.arange(10, 12, dtype=np.int32)
    for turn in turns:
        turn.top_logprobs = -turn.top_ids.astype(np.float16)
    (row,) = rows_of(make_trajectory(turns), 1.0)
    assert row.sampler_ids[row.mask].tolist() == [[0, 1], [3, 4], [10, 11]]
    assert row.sampler_listed[row.mask].tolist() == [[0, -1], [-3, -4], [-10, -11]]
    check_listed([row])
    turns[1].top_ids = turns[1].top_logprobs = None
    (row,) = rows_of(make_trajectory(turns), 1.0)
    with pytest.raises(
        TrainingError, match=r"s1 has no likeliest ids .*score_centering: it was recorded without"
    ):
        check_listed([row])
    turns[1].exempt = "the request's header"
    (row,) = rows_of(make_trajectory(turns), 1.0)
    check_listed([row])


def test_kept_ids_are_those_of_trained_tokens():
    """Beside turns that were sampled from the whole vocabulary, under a grammar, and of an exempt call."""
    turns = [make_turn(0, None, [1, 2], [3, 4, 5]), make_turn(1, 0, [5], [6]), make_turn(2, 1, [7], [8, 9])]
    for turn, counts in ((turns[0], [2, 1, 3]), (turns[2], [1, 1])):
        turn.kept_counts = np.array(counts, dtype=np.int32)
        turn.kept_ids = 10 * turn.index + np.arange(sum(counts), dtype=np.int32)
    turns[0].output_mask = np.array([1, 0, 1], dtype=np.uint8)
    (row,) = rows_of(make_trajectory(turns), 1.0)
    assert row.kept_counts.tolist() == [0, 0, 2, 0, 3, 0, 0, 0, 1, 1]
    assert row.kept_ids.tolist() == [0, 1, 3, 4, 5, 20, 21]
    batch = microbatch([row, replace(row, kept_ids=None, kept_counts=None)], [0, 1], {})
    kept = [[0, 1, -1], [3, 4, 5], [-1] * 3, [20, -1, -1], [21, -1, -1]]
    assert batch.kept_nm.tolist() == [*kept, *[[-1] * 3] * 5]
    turns[2].exempt = "the request's header"
    (row,) = rows_of(make_trajectory(turns), 1.0)
    assert row.kept_ids.tolist() == [0, 1, 3, 4, 5]
    assert microbatch([replace(row, kept_ids=None, kept_counts=None)], [0], {}).kept_nm is None


def test_a_token_is_as_old_as_the_keys_and_values_it_was_computed_from():
    """Its recorded logprob is of neither version: no comparison with the trainer's own counts it."""
    turn = make_turn(0, None, [1, 2], [3, 4, 5])
    turn.version_spans = (VersionSpan(3, 0, 1), VersionSpan(4, 1, 3))
    for turn.kv_version, expected in ((None, [3, 4, 4]), (3, [3, 3, 3])):
        (row,) = rows_of(make_trajectory([turn]), 1.0)
        assert row.versions.tolist() == [-1, -1, *expected]


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

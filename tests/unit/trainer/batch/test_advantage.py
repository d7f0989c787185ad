import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.trainer.batch.credit import (
    batch_deviation,
    centred,
    group_deviation,
    is_zero_variance,
    scaled,
)

REWARDS = st.lists(st.integers(-20, 20).map(lambda value: value / 4), min_size=2, max_size=16)


def advantages(rewards: list[float], *, normalize: bool) -> np.ndarray:
    apart = centred(np.array(rewards, dtype=np.float64)[:, None])
    return (scaled(apart, group_deviation(apart)) if normalize else apart)[:, 0]


def test_normalized_advantages_are_grpos():
    found = advantages([1, 0, 0, 1, 1, 1, 0, 1], normalize=True)
    # mean 5/8, sample variance (5·(3/8)² + 3·(5/8)²)/7
    deviation = ((5 * 0.375**2 + 3 * 0.625**2) / 7) ** 0.5
    np.testing.assert_allclose(found[0], 0.375 / deviation, rtol=1e-5)
    np.testing.assert_allclose(found[1], -0.625 / deviation, rtol=1e-5)


def test_unnormalized_advantages_are_dr_grpos():
    np.testing.assert_allclose(advantages([3, 1, 2, 2], normalize=False), [1, -1, 0, 0])


@given(st.lists(REWARDS, min_size=1, max_size=4))
def test_the_batchs_deviation_is_that_of_all_its_episodes(groups):
    apart = [centred(np.array(rewards)[:, None]) for rewards in groups]
    together = np.concatenate([np.array(rewards) - np.mean(rewards) for rewards in groups])
    assert batch_deviation(apart) == pytest.approx(np.std(together), abs=1e-12)


@given(REWARDS, st.booleans(), st.randoms())
def test_advantages_sum_to_zero_and_know_no_order(rewards, normalize, random):
    found = advantages(rewards, normalize=normalize)
    assert abs(float(found.sum())) < 1e-3
    order = list(range(len(rewards)))
    random.shuffle(order)
    shuffled = advantages([rewards[index] for index in order], normalize=normalize)
    np.testing.assert_allclose(shuffled, found[order], atol=1e-5)


@given(REWARDS, st.integers(1, 50), st.integers(-50, 50))
def test_normalized_advantages_know_no_scale(rewards, scale, shift):
    found = advantages(rewards, normalize=True)
    moved = advantages([scale * reward + shift for reward in rewards], normalize=True)
    np.testing.assert_allclose(moved, found, atol=1e-3)


@given(REWARDS, st.integers(2, 5))
def test_turns_without_rewards_of_their_own_change_nothing(rewards, turns):
    apart = centred(np.repeat(np.array(rewards)[:, None], turns, axis=1))
    plain = centred(np.array(rewards)[:, None])
    assert np.array_equal(apart, np.repeat(plain, turns, axis=1))
    assert group_deviation(apart) == pytest.approx(group_deviation(plain))
    assert batch_deviation([apart]) == pytest.approx(batch_deviation([plain]))


@pytest.mark.parametrize("rewards", [[1, 1, 1], [0.1 + 0.2, 0.3], [7.0], [1e6, 1e6]])
@pytest.mark.parametrize("normalize", [True, False])
def test_equal_rewards_give_exact_zeros(rewards, normalize):
    assert is_zero_variance(rewards)
    assert not advantages(rewards, normalize=normalize).any()


def test_small_differences_are_differences():
    assert not is_zero_variance([0.0, 0.001])
    assert not is_zero_variance([0, 0, 0, 1])


@pytest.mark.parametrize("rewards", [[], [1.0, float("nan")], [float("inf"), 0.0]])
def test_what_is_no_group_of_numbers_is_refused(rewards):
    with pytest.raises(ValueError, match="group's returns"):
        is_zero_variance(rewards)

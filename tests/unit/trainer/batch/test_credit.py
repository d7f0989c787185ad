"""Credit assignment by episode and by turn, against plain sums."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.trainer.learning_fixtures import make_trajectory, make_turn
from tidegate.config import TrainerSettings
from tidegate.trainer.batch.credit import MEMORY, BaselineCredit, RunningMeans
from tidegate.trainer.batch.rows import rows_of
from tidegate.types import Group, Outcome, Trajectory


def episode(reward: float, turns: tuple[float, ...] = (0.0,), tokens: int = 2) -> Trajectory:
    """A conversation of as many turns as rewards are given, of `tokens` tokens each."""
    made = [
        make_turn(index, index - 1 if index else None, [1, 2], [3] * tokens) for index in range(len(turns))
    ]
    for turn, own in zip(made, turns, strict=True):
        turn.reward = own
    found = make_trajectory(made)
    found.reward = reward
    return found


def group(*episodes: Trajectory) -> Group:
    return Group("g1", "t1", list(episodes))


def credit(**settings: object) -> BaselineCredit:
    return BaselineCredit(TrainerSettings(**settings))


def test_episodes_are_compared_within_their_group():
    groups = [group(episode(1), episode(0)), group(episode(5), episode(5), episode(2))]
    plain = credit(advantage_scale="none")(groups)
    assert plain == [[0.5, -0.5], [1.0, 1.0, -2.0]]
    assert credit(loss={"name": "dr_grpo"})(groups) == plain
    scaled = credit()(groups)
    assert scaled[0] == pytest.approx([0.5**0.5, -(0.5**0.5)], rel=1e-5)
    assert scaled[1] == pytest.approx([3**-0.5, 3**-0.5, -2 * 3**-0.5], rel=1e-5)
    assert credit(loss={"name": "dr_grpo"}, advantage_scale="group")(groups) == scaled


def test_the_batch_has_one_scale():
    groups = [group(episode(1), episode(0)), group(episode(5), episode(5), episode(2))]
    deviation = ((2 * 0.25 + 1 + 1 + 4) / 5) ** 0.5
    found = credit(advantage_scale="batch")(groups)
    assert found[0] == pytest.approx([0.5 / deviation, -0.5 / deviation], rel=1e-5)
    assert found[1] == pytest.approx([1 / deviation, 1 / deviation, -2 / deviation], rel=1e-5)


def test_leave_one_out_compares_with_the_other_episodes():
    groups = [group(episode(1), episode(0), episode(0.5)), group(episode(5), episode(2))]
    found = credit(baseline="leave_one_out")(groups)
    assert found[0] == pytest.approx([1 - 0.25, 0 - 0.75, 0.5 - 0.5])
    assert found[1] == pytest.approx([5 - 2, 2 - 5])
    scaled = credit(baseline="leave_one_out", advantage_scale="group")(groups)
    assert scaled[1] == pytest.approx([3 / 4.5**0.5, -3 / 4.5**0.5], rel=1e-5)


REWARDS = st.lists(
    st.lists(st.integers(-20, 20).map(lambda value: value / 4), min_size=1, max_size=4),
    min_size=1,
    max_size=5,
)


@given(REWARDS)
def test_the_batchs_baseline_is_reinforce_plus_plus(rewards):
    """(R − mean) ÷ standard deviation over all episodes of the batch."""
    groups = [group(*map(episode, episodes)) for episodes in rewards]
    together = np.concatenate(rewards)
    expected = (together - together.mean()) / (together.std() + 1e-6)
    trainer = {"baseline": "batch", "group_size": 1}
    np.testing.assert_allclose(np.concatenate(credit(**trainer)(groups)), expected, atol=1e-6)
    plain = np.concatenate(credit(**trainer, advantage_scale="none")(groups))
    np.testing.assert_allclose(plain, together - together.mean(), atol=1e-9)


def test_the_batchs_baseline_compares_turns_over_all_groups():
    one, other = episode(1.0, (0.5, 0.25)), episode(0.0, (1.0,))
    found = credit(baseline="batch", group_size=1, advantage_scale="none")([group(one), group(other)])
    # Returns from each turn on: 1.75, 1.25 and 1, then (ended) 0.
    assert found == [[pytest.approx([1.75 - 1.375, 1.25 - 0.625])], [pytest.approx(1.0 - 1.375)]]


def test_the_batchs_baseline_trains_on_groups_with_equal_rewards():
    alike = group(episode(1), episode(1))
    assert not credit().should_train(alike)
    assert credit(baseline="batch").should_train(alike)


def test_a_turn_is_credited_with_what_came_after_it():
    one, other = episode(1.0, (0.5, 0.0, 0.25)), episode(0.0, (0.0, 1.0))
    ((first, second),) = credit(advantage_scale="none")([group(one, other)])
    # Returns from each turn on: 1.75, 1.25, 1.25 and 1, 1, then (ended) 0.
    assert first == pytest.approx([1.75 - 1.375, 1.25 - 1.125, 1.25 - 0.625])
    assert second == pytest.approx([1.0 - 1.375, 1.0 - 1.125])
    rows = rows_of(one, first)
    assert rows[0].advantages[rows[0].mask] == pytest.approx(np.repeat(first, 2))


turn_rewards = st.lists(st.integers(-4, 4).map(float), min_size=1, max_size=5).map(tuple)


@given(st.lists(st.tuples(st.integers(-3, 3), turn_rewards), min_size=2, max_size=5))
def test_credit_by_turn_is_its_definition(drawn):
    episodes = [episode(float(reward), turns) for reward, turns in drawn]
    (found,) = credit(advantage_scale="none")([group(*episodes)])
    returns = [[reward + sum(turns[k:]) for k in range(5)] for reward, turns in drawn]
    for advantages, mine, (_, turns) in zip(found, returns, drawn, strict=True):
        each = advantages if isinstance(advantages, list) else [advantages] * len(turns)
        expected = [mine[k] - np.mean([one[k] for one in returns]) for k in range(len(turns))]
        assert each == pytest.approx(expected, abs=1e-9)


def test_equal_sums_by_different_turns_have_a_gradient():
    made = group(episode(1.0, (1.0, 0.0)), episode(1.0, (0.0, 1.0)))
    assert credit().should_train(made)
    ((first, second),) = credit()([made])
    assert first == pytest.approx([0.0, -1.0], abs=1e-5)
    assert second == pytest.approx([0.0, 1.0], abs=1e-5)


def test_truncated_episodes_count_but_are_not_trained_on():
    late, good, bad = episode(0.0), episode(1.0), episode(0.0)
    late.outcome = Outcome.TRUNCATED
    made = group(late, good, bad)
    trained = credit(advantage_scale="none")([made])
    masked = credit(advantage_scale="none", truncated_episodes="mask")([made])
    assert trained[0] == pytest.approx([-1 / 3, 2 / 3, -1 / 3])
    assert masked == [[None, *trained[0][1:]]]


def test_groups_without_a_gradient_are_not_trained_on():
    alike, apart = group(episode(1), episode(1)), group(episode(1), episode(0))
    late = group(episode(1), episode(0))
    for one in late.trajectories:
        one.outcome = Outcome.TRUNCATED
    plain, masking = credit(), credit(truncated_episodes="mask", dynamic_sampling=False)
    assert [plain.should_train(one) for one in (alike, apart, late)] == [False, True, True]
    assert [masking.should_train(one) for one in (alike, apart, late)] == [True, True, False]


def test_length_is_penalised_softly():
    episodes = [episode(1.0, (0.0,), tokens) for tokens in (10, 20, 25, 40, 90)]
    ((*found,),) = credit(advantage_scale="none", length_penalty=(20, 40))([group(*episodes)])
    rewards = np.array([1, 1, 0.75, 0, 0])
    assert found == pytest.approx(rewards - rewards.mean())


def test_an_episode_without_turns_is_in_its_group():
    none = episode(0.0, ())
    assert credit(advantage_scale="none")([group(none, episode(1.0))]) == [[0.0, 0.5]]


def by_key(key: str, *rewards: float) -> Group:
    episodes = [episode(reward) for reward in rewards]
    for one in episodes:
        one.client = key
    return group(*episodes)


def test_a_key_is_compared_with_its_other_episodes_so_far():
    plain = credit(baseline="key", group_size=1, advantage_scale="none")
    assert plain([by_key("a", 1.0), by_key("b", 5.0), by_key("a", 0.0), by_key("a", 0.5)]) == [
        [1.0 - 0.25], [0.0], [0.0 - 0.75], [0.5 - 0.5],
    ]  # fmt: skip
    assert plain([by_key("a", 1.0), by_key("b", 6.0)]) == [[1.0 - 0.5], [6.0 - 5.0]]
    tasks = [group(episode(1)), group(episode(0))]
    assert plain(tasks) == [[1.0], [-1.0]], "without a key, by task"


def test_the_first_episode_of_a_key_and_turns_of_their_own():
    plain = credit(baseline="key", group_size=1, advantage_scale="none")
    assert plain([by_key("a", 3.0)]) == [[0.0]]
    later = by_key("a", 1.0)
    later.trajectories[0] = episode(1.0, turns=(0.5, 0.25))
    later.trajectories[0].client = "a"
    assert plain([later]) == [[[1.75 - 3.0, 1.25 - 3.0]]]


@given(
    st.lists(st.lists(st.tuples(st.sampled_from("ab"), st.floats(-9, 9)), min_size=1, max_size=6), max_size=5)
)
def test_running_means_equal_plain_sums_and_survive_a_checkpoint(batches):
    means, before = RunningMeans(), []
    for batch in batches:
        found = means.baselines([key for key, _ in batch], [reward for _, reward in batch])
        for index, (key, reward) in enumerate(batch):
            others = [r for k, r in before if k == key]
            others += [r for at, (k, r) in enumerate(batch) if k == key and at != index]
            assert found[index] == pytest.approx(sum(others) / len(others) if others else reward, abs=1e-9)
        before += batch
        state, means = json.loads(json.dumps(means.state())), RunningMeans()
        means.restore(state)


def test_a_batch_whose_step_is_skipped_is_not_in_the_means():
    means = RunningMeans()
    means.baselines(["a"], [1.0])
    before = means.state()
    means.baselines(["a", "b", "a"], [3.0, 4.0, 5.0])
    means.uncount()
    means.uncount()
    assert means.state() == before


def test_the_mean_follows_a_policy_that_improves():
    means = RunningMeans()
    means.baselines(["a"] * 5000, [0.0] * 5000)
    means.baselines(["a"] * 1000, [1.0] * 1000)
    assert means.state()["a"] == [MEMORY, pytest.approx(0.5)]


def test_a_teacher_scales_what_rewards_give_and_keeps_groups_with_equal_rewards():
    groups = [group(episode(1), episode(0)), group(episode(1), episode(1))]
    plain = credit(advantage_scale="none")
    mixed = credit(advantage_scale="none", teacher={"url": "http://t", "reward_weight": 0.5})
    assert mixed(groups) == [[0.25, -0.25], [0.0, 0.0]]
    assert [plain.should_train(one) for one in groups] == [True, False]
    assert [mixed.should_train(one) for one in groups] == [True, True]
    filtering = credit(dynamic_sampling=True, teacher={"url": "http://t"})
    assert [filtering.should_train(one) for one in groups] == [True, False]


def test_with_a_teacher_alone_every_advantage_is_zero_and_an_episode_needs_no_others():
    alone = credit(group_size=1, truncated_episodes="mask", teacher={"url": "http://t", "reward_weight": 0})
    truncated = episode(0)
    truncated.outcome = Outcome.TRUNCATED
    assert alone([group(episode(1)), group(episode(0, turns=(1.0, 0.0)))]) == [[0.0], [0.0]]
    assert alone.should_train(group(episode(0)))
    assert alone([group(truncated)]) == [[None]]
    assert not alone.should_train(group(truncated))


def test_groups_without_a_token_to_train_on_are_replaced_whatever_their_advantages():
    spoken, silent, forced = episode(1), episode(0), episode(0.5)
    silent.turns = []
    forced.turns[0].output_mask = np.zeros(2, dtype=np.uint8)  # a grammar changed every token's distribution
    for training in (credit(), credit(baseline="batch"), credit(teacher={"url": "http://t"})):
        assert not training.should_train(group(silent, forced))
        assert training.should_train(group(silent, forced, spoken))


def of_policies(reward: float, turns: dict[str, list[float]], **own: float) -> Trajectory:
    """An episode with turns of several policies, in this order, their rewards, and rewards of policies."""
    drawn = [(name, value) for name, values in turns.items() for value in values]
    one = episode(reward, tuple(value for _, value in drawn))
    one.policy_rewards = own
    for turn, (name, _) in zip(one.turns, drawn, strict=True):
        turn.policy = name
    return one


def test_a_policy_is_compared_by_its_own_rewards_and_turns():
    batch = [
        group(
            of_policies(1.0, {"a": [0.0, 1.0], "b": [0.0]}, b=5.0),
            of_policies(0.0, {"b": [0.0], "a": [0.0, 0.0]}),
            of_policies(0.5, {"a": [0.0, 0.0]}),
        )
    ]
    first, second, third = credit(advantage_scale="none")(batch)[0]
    # Of `a`: returns [2, 2], [0, 0] and [0.5, 0.5]. Of `b`: 5 and 0, as the third episode has no turn of it.
    assert first == pytest.approx([2 - 2.5 / 3, 2 - 2.5 / 3, 2.5])
    assert second == pytest.approx([-2.5, -2.5 / 3, -2.5 / 3])
    assert third == pytest.approx(0.5 - 2.5 / 3)


def test_a_group_with_a_gradient_for_one_policy_is_trained_on():
    alike = [of_policies(1.0, {"a": [0.0], "b": [0.0]}) for _ in range(2)]
    assert not credit().should_train(group(*alike))
    assert credit().should_train(group(alike[0], of_policies(1.0, {"a": [0.0], "b": [0.0]}, b=0.0)))


def test_turns_of_a_frozen_policy_have_no_advantage():
    frozen = of_policies(1.0, {"a": [0.0], "b": [0.0]})
    frozen.turns[1].exempt = "policy b is frozen"
    first, _ = credit(advantage_scale="none")([group(frozen, of_policies(0.0, {"a": [0.0]}))])[0]
    assert first == pytest.approx([0.5, 0.0])

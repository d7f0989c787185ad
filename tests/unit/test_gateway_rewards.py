"""Rewards: slow, raising, hanging, not a number, missing; each has its own end."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tidegate.gateway import rewards
from tidegate.gateway.rewards import Scorer
from tidegate.types import Message, Outcome, Scored, Task, Trajectory

from .learning_fixtures import make_trajectory, make_turn

TASK = Task("t", "sums", [], answer=4)


class Rewarding:
    """A rewarder that does what it is made with."""

    def __init__(self, what: Callable[[], Any], names: Sequence[str] = ("exact",)) -> None:
        self.names = names
        self._what = what

    def score(
        self, task: Task, trajectory: Trajectory, output: str | None, messages: list[Message]
    ) -> Scored:
        result: Scored = self._what()
        return result


def trajectory(outcome: Outcome = Outcome.COMPLETED) -> Trajectory:
    return Trajectory("s", "t", "sums", "train", outcome, [], output="4")


async def ended(rewarder: Any, claimed: Any = None, task: Task | None = TASK, **more: Any) -> Trajectory:
    one = trajectory(more.pop("outcome", Outcome.COMPLETED))
    scorer = Scorer({} if rewarder is None else {"sums": rewarder}, more.pop("timeout_s", 5.0))
    await scorer.reward(one, task, more.pop("posted", {}), claimed, more.pop("left_s", 60.0))
    assert not more
    return one


async def test_the_environment_wins_over_the_agent_and_both_are_kept() -> None:
    one = await ended(Rewarding(lambda: Scored(0.5, {"exact": 1, "form": 0.0})), claimed=1)
    assert (one.reward, one.agent_reward, one.outcome) == (0.5, 1.0, Outcome.COMPLETED)
    assert one.reward_parts == {"exact": 1.0, "form": 0.0}


@pytest.mark.parametrize("rewarder", [None, Rewarding(lambda: 1 / 0, names=())])
async def test_without_a_reward_of_its_own_the_agents_counts(rewarder: Any) -> None:
    assert (await ended(rewarder, claimed=0.25)).reward == 0.25
    posted = await ended(rewarder, posted={"a": 0.25, "b": 0.5})
    assert (posted.reward, posted.reward_parts) == (0.75, {"a": 0.25, "b": 0.5})


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (lambda: 1 / 0, "raised ZeroDivisionError"),
        (lambda: Scored(math.nan, {}), "reward is nan"),
        (lambda: Scored(math.inf, {}), "reward is inf"),
        (lambda: Scored(1.0, {"form": math.nan}), "form is nan"),
        (lambda: Scored(None, {}), "reward is None"),
        (lambda: None, "gave a NoneType"),
        (lambda: 1.0, "gave a float"),
        (lambda: exec("raise SystemExit(3)"), "raised SystemExit"),
    ],
)
async def test_a_bad_reward_is_reward_error(what: Callable[[], Any], why: str) -> None:
    one = await ended(Rewarding(what))
    assert (one.outcome, one.reward) == (Outcome.REWARD_ERROR, None)
    assert why in str(one.error)


@pytest.mark.parametrize("claimed", [math.nan, "1", [1], True])
async def test_an_agents_reward_that_is_no_number_is_reward_error(claimed: Any) -> None:
    assert (await ended(None, claimed=claimed)).outcome is Outcome.REWARD_ERROR


async def test_no_reward_at_all_is_reward_error() -> None:
    one = await ended(None)
    assert one.outcome is Outcome.REWARD_ERROR
    assert "no reward" in str(one.error)
    assert "no task" in str((await ended(Rewarding(lambda: Scored(1.0, {})), task=None)).error)


@pytest.mark.parametrize("outcome", [Outcome.AGENT_ERROR, Outcome.INFRA_ERROR, Outcome.TIMEOUT])
async def test_a_failure_is_never_rewarded(outcome: Outcome) -> None:
    one = await ended(Rewarding(lambda: Scored(1.0, {})), claimed=1.0, outcome=outcome)
    assert (one.outcome, one.reward) == (outcome, None)


async def test_a_reward_that_hangs_is_late_and_does_not_use_up_the_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rewards, "_AT_ONCE", 1)
    release = threading.Event()
    hanging = Rewarding(lambda: release.wait(30))
    scorer = Scorer({"sums": hanging, "other": Rewarding(lambda: Scored(1.0, {}))}, 0.05)
    for stuck in (1, 2):
        one = trajectory()
        await scorer.reward(one, TASK, {}, None, 60.0)
        assert (one.outcome, scorer.stuck) == (Outcome.REWARD_ERROR, stuck)
        assert one.error == "the reward was not there after 0.05 s"
    good = trajectory()
    good.env = "other"
    await scorer.reward(good, TASK, {}, None, 60.0)
    assert good.reward == 1.0
    monkeypatch.setattr(rewards, "MAX_STUCK", 2)
    await scorer.reward(one := trajectory(), TASK, {}, None, 60.0)
    assert "2 rewards hang" in str(one.error)
    release.set()


async def test_the_sessions_deadline_bounds_the_reward() -> None:
    release = threading.Event()
    one = await ended(Rewarding(lambda: release.wait(30)), left_s=0.05)
    release.set()
    assert (one.outcome, one.error) == (Outcome.REWARD_ERROR, "the reward was not there after 0.05 s")


async def test_an_environments_turn_rewards_replace_what_was_posted() -> None:
    one = make_trajectory([make_turn(0, None, [1], [2]), make_turn(1, 0, [3], [4])])
    one.env = "sums"
    one.turns[0].reward = 7.0
    scorer = Scorer({"sums": Rewarding(lambda: Scored(1.0, {}, {}, {1: -0.5}))}, 5.0)
    await scorer.reward(one, TASK, {}, None, 60.0)
    assert (one.reward, [turn.reward for turn in one.turns]) == (1.0, [0.0, -0.5])


@pytest.mark.parametrize(
    ("given", "why"),
    [({2: 1.0}, r"turn 2 was rewarded, but there is none; turns: \[0\]"), ({0: math.nan}, "turn 0 is nan")],
)
async def test_what_is_no_reward_of_a_turn(given: dict[int, float], why: str) -> None:
    one = make_trajectory([make_turn(0, None, [1], [2])])
    one.env = "sums"
    await Scorer({"sums": Rewarding(lambda: Scored(1.0, {}, {}, given))}, 5.0).reward(
        one, TASK, {}, None, 60.0
    )
    assert one.outcome == Outcome.REWARD_ERROR
    assert re.search(why, str(one.error))

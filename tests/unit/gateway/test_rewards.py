"""Rewards that are slow, raise, hang, are missing or not a number: the outcome of each."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.local_rewards import LocalRewards
from tests.unit.trainer.learning_fixtures import make_trajectory, make_turn
from tidegate.config import EnvSettings
from tidegate.envs.base import check_reward_timeout, load_environment
from tidegate.errors import ConfigError, RewardUnavailableError
from tidegate.gateway.environments.base import EpisodeLostError
from tidegate.gateway.groups.rewards import Scorer
from tidegate.types import Message, Outcome, Scored, Task, Trajectory

TASK = Task("t", "sums", [], answer=4)
LATE = "the reward was not there after 0.05 s (env.reward_timeout_s)"


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
    scorer = Scorer(LocalRewards({} if rewarder is None else {"sums": rewarder}), more.pop("policies", None))
    await scorer.reward(one, task, more.pop("posted", {}), claimed)
    assert not more
    return one


async def test_the_environment_wins_over_the_agent_and_both_are_kept() -> None:
    one = await ended(Rewarding(lambda: Scored(0.5, {"exact": 1, "form": 0.0})), claimed=1)
    assert (one.reward, one.agent_reward, one.outcome) == (0.5, 1.0, Outcome.COMPLETED)
    assert one.reward_parts == {"exact": 1.0, "form": 0.0}


async def test_an_agent_may_reward_each_policy() -> None:
    one = await ended(None, claimed={"solver": 1, "verifier": 0.5}, policies=("solver", "verifier"))
    assert (one.reward, one.agent_reward) == (0.75, 0.75)
    assert one.policy_rewards == {"solver": 1.0, "verifier": 0.5}
    assert [one.reward_of(name) for name in ("solver", "verifier", "critic")] == [1.0, 0.5, 0.75]
    wins = await ended(Rewarding(lambda: Scored(0.25, {})), claimed={"solver": 1}, policies=("solver",))
    assert (wins.reward, wins.agent_reward, wins.policy_rewards) == (0.25, 1.0, {})
    failed = await ended(None, claimed={"solver": 1}, policies=("solver",), outcome=Outcome.TIMEOUT)
    assert (failed.reward, failed.agent_reward, failed.policy_rewards) == (None, 1.0, {})


@pytest.mark.parametrize(
    ("claimed", "policies", "why"),
    [
        (
            {"critic": 1.0},
            ("solver",),
            "policy 'critic', which this run does not have: the policies are solver",
        ),
        ({"solver": 1.0}, (), "policy 'solver', which this run does not have: it has only one"),
        ({"solver": math.nan}, ("solver",), "reward of policy 'solver' is nan"),
        ({}, ("solver",), "names no policy"),
    ],
)
async def test_a_reward_of_an_unknown_policy_is_refused(claimed: Any, policies: Any, why: str) -> None:
    one = await ended(None, claimed=claimed, policies=policies)
    assert (one.outcome, one.reward, one.policy_rewards) == (Outcome.REWARD_ERROR, None, {})
    assert why in str(one.error)


async def test_rewards_of_policies_come_from_the_environment() -> None:
    scored = Scored(0.5, {"form": 0.5, "exact": 1.0}, policy_rewards={"solver": 1.5})
    one = await ended(Rewarding(lambda: scored), policies=("solver", "verifier"))
    assert (one.reward, one.policy_rewards) == (0.5, {"solver": 1.5})
    one = await ended(Rewarding(lambda: scored), policies=("verifier",))
    assert "policy 'solver', which this run does not have" in str(one.error)
    one = await ended(Rewarding(lambda: Scored(0.5, {}, policy_rewards={"solver": math.inf})))
    assert "the reward of policy 'solver' is inf" in str(one.error)


@pytest.mark.parametrize("what", [lambda: Scored(0.5, {"exact": 1}), lambda: 1 / 0])
async def test_the_time_of_the_rewards_is_recorded_also_if_they_fail(what: Callable[[], Any]) -> None:
    before = time.time()
    one = await ended(Rewarding(what))
    assert before <= one.reward_started <= one.reward_started + one.reward_seconds <= time.time() + 0.1
    assert one.reward_seconds > 0
    without = await ended(None, claimed=1)
    assert (without.reward_started, without.reward_seconds) == (0.0, 0.0)


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
        (lambda: Scored(1.0, {"form": math.nan}), "the reward 'form' is nan"),
        (lambda: Scored(None, {}), "reward is None"),
        (lambda: None, "returned a NoneType"),
        (lambda: 1.0, "returned a float"),
        (lambda: exec("raise SystemExit(3)"), "raised SystemExit"),
    ],
)
async def test_a_bad_reward_is_reward_error(what: Callable[[], Any], why: str) -> None:
    one = await ended(Rewarding(what))
    assert (one.outcome, one.reward) == (Outcome.REWARD_ERROR, None)
    assert why in str(one.error)


def refuse() -> None:
    raise RewardUnavailableError("the judge does not respond")


async def test_a_judge_that_does_not_respond_is_infra_error() -> None:
    one = await ended(Rewarding(refuse))
    assert (one.outcome, one.reward) == (Outcome.INFRA_ERROR, None)
    assert "does not respond" in str(one.error)


@pytest.mark.parametrize("claimed", [math.nan, "1", [1]])
async def test_an_agents_reward_that_is_no_number_is_reward_error(claimed: Any) -> None:
    assert (await ended(None, claimed=claimed)).outcome is Outcome.REWARD_ERROR


async def test_no_reward_at_all_is_reward_error() -> None:
    one = await ended(None)
    assert one.outcome is Outcome.REWARD_ERROR
    assert "no reward" in str(one.error)
    assert "without a task" in str((await ended(Rewarding(lambda: Scored(1.0, {})), task=None)).error)


@pytest.mark.parametrize("outcome", [Outcome.AGENT_ERROR, Outcome.INFRA_ERROR, Outcome.TIMEOUT])
async def test_a_failure_is_never_rewarded(outcome: Outcome) -> None:
    one = await ended(Rewarding(lambda: Scored(1.0, {})), claimed=1.0, outcome=outcome)
    assert (one.outcome, one.reward) == (outcome, None)


async def test_an_environments_turn_rewards_replace_what_was_posted() -> None:
    one = make_trajectory([make_turn(0, None, [1], [2]), make_turn(1, 0, [3], [4])])
    one.env = "sums"
    one.turns[0].reward = 7.0
    scorer = Scorer(LocalRewards({"sums": Rewarding(lambda: Scored(1.0, {}, {}, {1: -0.5}))}))
    await scorer.reward(one, TASK, {}, None)
    assert (one.reward, [turn.reward for turn in one.turns]) == (1.0, [0.0, -0.5])


@pytest.mark.parametrize(
    ("given", "why"),
    [({2: 1.0}, r"turn 2 was rewarded but does not exist; turns: \[0\]"), ({0: math.nan}, "turn 0 is nan")],
)
async def test_what_is_no_reward_of_a_turn(given: dict[int, float], why: str) -> None:
    one = make_trajectory([make_turn(0, None, [1], [2])])
    one.env = "sums"
    await Scorer(LocalRewards({"sums": Rewarding(lambda: Scored(1.0, {}, {}, given))})).reward(
        one, TASK, {}, None
    )
    assert one.outcome == Outcome.REWARD_ERROR
    assert re.search(why, str(one.error))


async def test_a_lost_episode_is_no_fault_of_its_reward() -> None:
    class Lost(LocalRewards):
        async def score(self, episode: str, task: Task, trajectory: Trajectory) -> Scored:
            raise EpisodeLostError("its process was killed")

    one = trajectory()
    await Scorer(Lost({"sums": Rewarding(lambda: None)})).reward(one, TASK, {}, None)
    assert (one.outcome, one.error) == (Outcome.INFRA_ERROR, "its process was killed")


def test_a_judge_keeps_within_the_deadline_by_default_and_is_refused_beyond_it(tmp_path: Path) -> None:
    judge = {"url": "http://127.0.0.1:9/v1", "model": "m"}
    data = tmp_path / "questions.jsonl"
    data.write_text('{"question": "Who?", "answer": "x"}\n')
    options = {"path": str(data), "eval_path": str(data), "metric": "judge", "judge": judge}
    check_reward_timeout(load_environment("search_qa", options), EnvSettings().reward_timeout_s)
    options["judge"] = {**judge, "timeout_s": 60, "attempts": 3}
    parts = [{"use": "arithmetic"}, {"use": "search_qa", "options": options}]
    with pytest.raises(ConfigError, match=r"env\.reward_timeout_s = 60 is less than the 180 s .*'search_qa'"):
        check_reward_timeout(load_environment("mixture", {"parts": parts}), 60.0)

"""Rewards of finished sessions: the environment's, computed by its service, or those that were posted."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, TypeVar

from tidegate.errors import RewardError, RewardUnavailableError, UnrewardedError
from tidegate.gateway.environments.base import EnvironmentService, EpisodeLostError
from tidegate.service.backoff import back_off
from tidegate.types import Outcome, Task, Trajectory, finite, finite_reward

T = TypeVar("T")
log = logging.getLogger("tidegate.gateway")
OUTAGE_S = 3600.0
"""Seconds for which the call of a judge that is unavailable is repeated."""
FIRST_S, LONGEST_S = 1.0, 30.0
"""Delays between the calls."""


class Scorer:
    """Sets the rewards of trajectories; agents cannot reach it.

    Args:
        environments: The environments with their reward functions; None: there are none.
        policies: Names of the policies that a reward may name; None: any.
    """

    def __init__(
        self, environments: EnvironmentService | None, policies: Collection[str] | None = None
    ) -> None:
        self._environments = environments
        self._policies = policies

    def scores(self, env: str | None) -> bool:
        """Whether an environment of this name has reward functions."""
        info = None if self._environments is None else self._environments.info(env or "")
        return info is not None and bool(info.rewards)

    async def reward(
        self,
        trajectory: Trajectory,
        task: Task | None,
        posted: Mapping[str, float],
        agent_reward: Any,
        *,
        once: bool = True,
    ) -> None:
        """Sets a trajectory's reward; a reward that fails makes its outcome `reward_error`.

        If the environment's service lost the episode, or a service that a reward calls failed, the outcome is
        `infra_error`. An outcome that is not trainable stays, without a reward.

        Args:
            trajectory: The trajectory, whose reward, parts, metrics and outcome are set.
            task: Its task; None: there is none.
            posted: Rewards that were posted while the session ran, by name.
            agent_reward: The reward that the agent returned, one or one for each policy, not validated.
            once: Whether a service that fails ends the episode; otherwise it is called again, as the episode
                cannot be made again.
        """
        try:
            if agent_reward is not None:
                self._set_agent_reward(trajectory, finite_reward(agent_reward))
            elif posted:
                trajectory.agent_reward = finite("the sum of the rewards", sum(posted.values()))
            if trajectory.outcome.trainable:
                trajectory.reward_parts = dict(posted)
                await self._reward(trajectory, task, once)
                # Each reward is finite, but the trainer adds them, and the sum may overflow; absolute
                # values bound any order.
                own = map(abs, trajectory.policy_rewards.values())
                largest = max(abs(trajectory.reward or 0.0), *own, 0.0)
                sizes = [largest, *(abs(turn.reward) for turn in trajectory.turns)]
                finite("the sum of the episode's and its turns' rewards", sum(sizes))
        except (RewardError, EpisodeLostError) as error:
            trajectory.metrics |= error.metrics if isinstance(error, RewardError) else {}
            if trajectory.outcome.trainable:
                trajectory.outcome = _outcome(error)
                trajectory.error, trajectory.reward = str(error), None
            trajectory.policy_rewards = {}

    def _set_agent_reward(self, trajectory: Trajectory, reward: float | dict[str, float]) -> None:
        """Sets the agent's own reward: of rewards of policies the mean."""
        if isinstance(reward, dict):
            self._check_policies(reward)
            if trajectory.outcome.trainable:
                trajectory.policy_rewards = reward
            reward = finite("the mean of the agent's rewards", sum(reward.values()) / len(reward))
        trajectory.agent_reward = reward

    def _check_policies(self, rewards: Mapping[str, float]) -> None:
        """Raises RewardError for a reward of a policy that the run does not have."""
        known = self._policies
        if known is not None and (unknown := [name for name in rewards if name not in known]):
            there = f"the policies are {', '.join(known)}" if known else "it has only one"
            raise RewardError(f"a reward names policy {unknown[0]!r}, which this run does not have: {there}")

    async def _reward(self, trajectory: Trajectory, task: Task | None, once: bool) -> None:
        if self._environments is not None and self.scores(trajectory.env):
            if task is None:
                raise RewardError(f"environment {trajectory.env!r} cannot score a session without a task")
            session = trajectory.session_id
            call = functools.partial(self._environments.score, session, task, trajectory)
            # Two clocks: spans need the time of day, and a duration must not jump when that is set.
            trajectory.reward_started, began = time.time(), time.monotonic()
            try:
                scored = await (
                    call() if once else retry_while_unavailable(call, f"the reward of session {session}")
                )
            finally:
                trajectory.reward_seconds = time.monotonic() - began
            self._check_policies(scored.policy_rewards)
            trajectory.reward, trajectory.policy_rewards = scored.reward, dict(scored.policy_rewards)
            trajectory.reward_parts |= scored.parts
            trajectory.metrics |= scored.metrics
            if scored.turn_rewards:
                reward_turns(trajectory, scored.turn_rewards)
        elif trajectory.agent_reward is not None:
            trajectory.reward = trajectory.agent_reward
        # The turns carry the reward, and None would mean that the episode has none.
        elif any(turn.reward for turn in trajectory.turns):
            trajectory.reward = 0.0
        else:
            raise RewardError(
                "there is no reward: the environment has no reward functions and the agent gave none"
            )


def _outcome(error: RewardError | EpisodeLostError) -> Outcome:
    if isinstance(error, EpisodeLostError | RewardUnavailableError):
        return Outcome.INFRA_ERROR
    return Outcome.UNREWARDED if isinstance(error, UnrewardedError) else Outcome.REWARD_ERROR


def reward_turns(trajectory: Trajectory, rewards: Mapping[int, float]) -> None:
    """Replaces the rewards of all turns; unlisted turns get 0. Raises RewardError."""
    turns = {turn.index: turn for turn in trajectory.turns}
    if unknown := [index for index in rewards if index not in turns]:
        raise RewardError(f"turn {unknown[0]!r} was rewarded but does not exist; turns: {sorted(turns)}")
    for turn in turns.values():
        turn.reward = finite(f"the reward of turn {turn.index}", rewards.get(turn.index, 0.0))


async def retry_while_unavailable(call: Callable[[], Awaitable[T]], what: str) -> T:
    """Repeats a call of the judge while the judge is unavailable, as what it judges cannot be made again.

    Args:
        call: Calls the judge.
        what: What waits, for the log.

    Returns:
        The result of the call.

    Raises:
        RewardUnavailableError: The judge is still unavailable after OUTAGE_S.
    """
    failures, end = 0, asyncio.get_running_loop().time() + OUTAGE_S
    while True:
        try:
            return await call()
        except RewardUnavailableError as error:
            # Checked after a call, so that one is made even if the last pause lasted beyond the end.
            if asyncio.get_running_loop().time() >= end:
                raise
            log.warning("%s: %s; it is called again", what, error)
        failures = await back_off(failures, FIRST_S, LONGEST_S)

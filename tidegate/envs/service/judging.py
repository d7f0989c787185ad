"""Judges episodes in the process of the environment service, after a worker has computed their rewards."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

import msgspec

from tidegate.envs.judge.judge import RewardJudge
from tidegate.errors import ConfigError, UnrewardedError
from tidegate.types import CONVERSATION, Scored, Task, Trajectory, from_wire


def with_judge(about: Mapping[str, Any], judge: RewardJudge) -> dict[str, Any]:
    """Returns the description of environments with the judge's rewards after their own.

    Raises:
        ConfigError: A reward of an environment has the name of one of the judge's.
    """
    for name, environment in about.items():
        if taken := set(environment["rewards"]) & set(judge.names):
            raise ConfigError(
                f"the environment {name!r} has a reward named {min(taken)!r}, as has env.judge: rename the "
                "environment's"
            )
    return {
        name: {**environment, "rewards": [*environment["rewards"], *judge.names], "ranked": judge.ranks}
        for name, environment in about.items()
    }


async def judged(
    judge: RewardJudge, scored: Awaitable[Any], about: Mapping[str, Any], task: str, trajectory: bytes
) -> Any:
    """Returns an episode's rewards with the judge's.

    In an environment without rewards, the agent's reward counts as the environment's own.

    Args:
        judge: The judge.
        scored: Computes the environment's own rewards.
        about: The environments, as `with_judge` describes them.
        task: The task as JSON.
        trajectory: The episode.

    Raises:
        RewardError: A reward failed, or the judge gave no valid verdict.
    """
    try:
        own: Scored | None = msgspec.convert(await scored, Scored)
    except UnrewardedError:  # no feedback, and no opinion of a function
        own = None
    ended: Trajectory = await asyncio.to_thread(from_wire, trajectory, Trajectory)
    if ended.env != CONVERSATION and about[ended.env]["rewards"] == judge.names:
        own = (
            None
            if ended.agent_reward is None
            else Scored(ended.agent_reward, {}, policy_rewards=ended.policy_rewards)
        )
    return msgspec.to_builtins(await judge.score(_task(task), ended, own))


async def ranked(judge: RewardJudge, task: str, trajectories: Sequence[bytes]) -> Any:
    """Returns what a ranking adds to the episodes of a group. Raises RewardError."""
    ended = [await asyncio.to_thread(from_wire, data, Trajectory) for data in trajectories]
    return msgspec.to_builtins(await judge.rank(_task(task), ended))


def _task(task: str) -> Task:
    return msgspec.convert(json.loads(task), Task)

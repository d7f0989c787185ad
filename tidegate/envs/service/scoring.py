"""Scores episodes in a worker process, and validates what the environments return."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from tidegate.envs.base import Environment
from tidegate.envs.unavailable import is_unavailable
from tidegate.errors import RewardError, RewardUnavailableError
from tidegate.service.threads import in_thread
from tidegate.tracebacks import where
from tidegate.types import Message, Scored, Task, Trajectory, finite, finite_by_name


async def score(
    environment: Environment,
    task: Task,
    trajectory: Trajectory | None,
    output: str | None,
    messages: Sequence[Message],
    state: Any = None,
) -> Scored:
    """Scores one episode; async rewards run on the event loop, then the others together in a thread.

    Arguments and result are those of `Environment.score`.

    Raises:
        RewardUnavailableError: A service that a reward calls did not respond.
        RewardError: A reward raised or returned no finite number, or `Environment.score` itself did.
    """
    try:
        awaited = await environment.await_rewards(task, trajectory, output, messages, state)
        call = partial(environment.score, task, trajectory, output, messages, state, awaited)
        return check(await in_thread(call, "reward"))
    except RewardError:
        raise
    except Exception as error:
        kind = RewardUnavailableError if is_unavailable(error) else RewardError
        raise kind(f"the reward raised {type(error).__name__}: {error}{where(error)}") from error


def check(scored: object) -> Scored:
    """Returns a score with Python's floats. Raises RewardError, which names the number that is not finite, or
    the name that is not a text."""
    if not isinstance(scored, Scored):
        raise RewardError(f"the reward returned a {type(scored).__name__}, not a Scored")
    return Scored(
        finite("reward", scored.reward),
        finite_by_name("the reward ", scored.parts),
        finite_by_name("the metric ", scored.metrics),
        {int(turn): finite(f"turn {turn}", value) for turn, value in scored.turn_rewards.items()},
        finite_by_name("the reward of policy ", scored.policy_rewards),
    )

"""Limits of clients: the calls of a key in a minute, and the range of rewards."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from tidegate.errors import GatewayError
from tidegate.gateway.errors import ApiError
from tidegate.gateway.project_keys import ProjectKey
from tidegate.gateway.sessions.session import GatewaySession

MINUTE_S = 60.0
MAX_REWARDS = 64
"""Limit of the rewards of a conversation and its replies."""


class CallRates:
    """Counts the calls of each key by the token-bucket rule.

    A key may make `calls_per_minute` calls at once, and this number in any minute on average.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}
        """By the key's name: the calls that it may still make, and when that was so."""

    def check(self, key: ProjectKey) -> None:
        """Count a call. Raises ApiError (429) if the key has made too many."""
        limit = key.calls_per_minute
        if limit is None:
            return
        now = self._clock()
        left, then = self._buckets.get(key.name, (float(limit), now))
        left = min(float(limit), left + (now - then) * limit / MINUTE_S)
        if left < 1:
            self._buckets[key.name] = left, now
            wait_s = math.ceil((1 - left) * MINUTE_S / limit)
            raise ApiError(
                f"key {key.name!r} may make {limit} calls a minute; try again in {wait_s} s",
                status=429,
                type="rate_limit_error",
                code="rate_limit_exceeded",
                retryable=True,
            )
        self._buckets[key.name] = left - 1, now


def check_reward(value: object, limits: tuple[float, float]) -> None:
    """Raises GatewayError (400) if a client's reward, or one of a policy, is outside the declared range."""
    for one in value.values() if isinstance(value, dict) else ():
        check_reward(one, limits)
    if isinstance(value, int | float) and not limits[0] <= value <= limits[1]:
        shown = f"{value:g}" if isinstance(value, float) else f"{value}"[:40]  # no float holds some integers
        raise GatewayError(
            f"the reward {shown} is outside gateway.reward_range = [{limits[0]:g}, {limits[1]:g}]",
            status=400,
        )


def check_total(
    session: GatewaySession, name: str, value: float, turn: int | None, limits: tuple[float, float]
) -> None:
    """Raises GatewayError (400) if a further reward makes a session's total leave the declared range.

    Also if the session would have more than MAX_REWARDS.

    Args:
        session: The session.
        name: Name of the reward.
        value: The reward.
        turn: The turn that it is for; None: the session.
        limits: The range.
    """
    parts = [(None, session.rewards), *session.turn_rewards.items()]
    rewards = {(index, one): given for index, named in parts for one, given in named.items()}
    rewards[turn, name] = value
    if len(rewards) > MAX_REWARDS:
        raise GatewayError(f"a conversation has {MAX_REWARDS} rewards at most", status=400)
    check_reward(sum(rewards.values()), limits)

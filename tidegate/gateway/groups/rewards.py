"""Computes the rewards of finished sessions, inside the gateway so that agents cannot reach them.

A rewarder is synchronous, possibly slow code of the environment. Each call runs in its own thread, up to
`_AT_ONCE` at a time, with a timeout that starts with the thread. Python cannot end a hanging thread: it is
abandoned, counted in `stuck`, and its slot is freed. Above `MAX_STUCK` no reward starts until some threads
end; until then sessions end as `reward_error`. A rewarder that holds the interpreter lock blocks the whole
gateway; such code belongs in a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tidegate.errors import RewardError
from tidegate.tracebacks import where
from tidegate.types import Message, Outcome, Scored, Task, Trajectory

MAX_STUCK = 64
_AT_ONCE = 16


class UnrewardedError(RewardError):
    """Nothing has rewarded the episode, which is no failure."""


class Rewarder(Protocol):
    """Scores an episode for an environment; must be pure, and is called in a thread."""

    @property
    def names(self) -> Sequence[str]:
        """Names of the reward functions; empty: the agent's own reward is used."""

    def score(
        self, task: Task, trajectory: Trajectory, output: str | None, messages: list[Message]
    ) -> Scored: ...


class Scorer:
    """Runs rewarders off the event loop; create it within a running loop."""

    def __init__(self, rewarders: Mapping[str, Rewarder], timeout_s: float) -> None:
        self._rewarders = rewarders
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self.stuck = 0

    def of(self, env: str | None) -> Rewarder | None:
        """The environment's rewarder; None if it has no reward functions."""
        rewarder = self._rewarders.get(env or "")
        return rewarder if rewarder is not None and rewarder.names else None

    async def reward(
        self,
        trajectory: Trajectory,
        task: Task | None,
        posted: Mapping[str, float],
        agent_reward: Any,
    ) -> None:
        """Set a trajectory's reward; a reward that fails makes its outcome `reward_error`.

        `posted` are the rewards posted while the session ran, `agent_reward` is the agent's result. An
        outcome that is not trainable stays, without a reward.
        """
        try:
            if agent_reward is not None:
                trajectory.agent_reward = number("the agent's reward", agent_reward)
            elif posted:
                trajectory.agent_reward = sum(posted.values())
            if trajectory.outcome.trainable:
                trajectory.reward_parts = dict(posted)
                await self._reward(trajectory, task)
        except RewardError as error:
            if trajectory.outcome.trainable:
                unrewarded = isinstance(error, UnrewardedError)
                trajectory.outcome = Outcome.UNREWARDED if unrewarded else Outcome.REWARD_ERROR
                trajectory.error = str(error)

    async def _reward(self, trajectory: Trajectory, task: Task | None) -> None:
        rewarder = self.of(trajectory.env)
        if rewarder is not None and task is not None:
            scored = await self.score(rewarder, task, trajectory)
            trajectory.reward = float(scored.reward)
            trajectory.reward_parts |= {name: float(value) for name, value in scored.parts.items()}
            trajectory.metrics |= {name: float(value) for name, value in scored.metrics.items()}
            if scored.turn_rewards:
                reward_turns(trajectory, scored.turn_rewards)
        elif rewarder is not None:
            raise RewardError(f"environment {trajectory.env!r} cannot score a session without a task")
        elif trajectory.agent_reward is not None:
            trajectory.reward = trajectory.agent_reward
        elif any(turn.reward for turn in trajectory.turns):
            trajectory.reward = 0.0
        else:
            raise RewardError(
                "there is no reward: the environment has no reward functions and the agent gave none"
            )

    async def score(self, rewarder: Rewarder, task: Task, trajectory: Trajectory) -> Scored:
        """Score one episode and validate the result.

        Raises RewardError if the rewarder raises, times out or returns a number that is not finite.
        """

        def run() -> Scored:
            return rewarder.score(task, trajectory, trajectory.output, trajectory.messages)

        async with self._slots:
            if self.stuck >= MAX_STUCK:
                raise RewardError(f"{self.stuck} rewards hang; no reward starts until some of them end")
            return check(await self._in_thread(run))

    async def _in_thread(self, run: Callable[[], object]) -> object:
        """Run a function in a thread and return its result; after the timeout the thread counts as stuck."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[tuple[object, BaseException | None]] = loop.create_future()

        def settle(result: object, error: BaseException | None) -> None:
            if done.cancelled():
                self.stuck -= 1
            else:
                done.set_result((result, error))

        def work() -> None:
            result, raised = None, None
            try:
                result = run()
            except BaseException as error:  # noqa: BLE001 - any exception of an environment is an outcome
                raised = error
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(settle, result, raised)

        threading.Thread(target=work, daemon=True, name="reward").start()
        try:
            await asyncio.wait((done,), timeout=self._timeout_s)
        finally:
            if not done.done():
                done.cancel()
                self.stuck += 1
        if done.cancelled():
            raise RewardError(
                f"the reward was not there after {self._timeout_s:.3g} s (env.reward_timeout_s)"
            )
        result, error = done.result()
        if error is not None:
            if isinstance(error, RewardError):  # it already names the place
                raise error
            raise RewardError(f"the reward raised {type(error).__name__}: {error}{where(error)}")
        return result


def reward_turns(trajectory: Trajectory, rewards: Mapping[int, float]) -> None:
    """Replace the rewards of all turns; unlisted turns get 0. Raises RewardError."""
    turns = {turn.index: turn for turn in trajectory.turns}
    if unknown := [index for index in rewards if index not in turns]:
        raise RewardError(f"turn {unknown[0]!r} was rewarded but does not exist; turns: {sorted(turns)}")
    for turn in turns.values():
        turn.reward = number(f"the reward of turn {turn.index}", rewards.get(turn.index, 0.0))


def check(scored: object) -> Scored:
    """Validate a score; raises RewardError that names the number that is not finite."""
    if not isinstance(scored, Scored):
        raise RewardError(f"the reward returned a {type(scored).__name__}, not a Scored")
    for name, value in [("reward", scored.reward), *scored.parts.items(), *scored.metrics.items()]:
        number(name, value)
    return scored


def number(name: str, value: object) -> float:
    """Return `value` as a float; raises RewardError if it is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RewardError(f"{name} is {value!r}, not a finite number")
    return float(value)

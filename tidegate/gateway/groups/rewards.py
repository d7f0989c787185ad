"""Rewards of finished sessions, where an agent cannot reach them.

A rewarder is the environment's own, synchronous, possibly slow code. It runs in a thread of its own, a few
at a time, under a deadline that starts when it starts: the others wait, each no longer than those before it
take. A thread that hangs cannot be ended in Python: it is abandoned and counted, its place is given to
others, and past `MAX_STUCK` of them nothing more is scored until some end (sessions then end as
`reward_error`, with this reason). A rewarder that holds the interpreter's lock stops everything; such code
belongs in a process of its own.
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


class Rewarder(Protocol):
    """What an environment scores an episode with; pure, and called in a thread."""

    @property
    def names(self) -> Sequence[str]:
        """Its reward functions; empty: the environment has none, and the agent's reward counts."""

    def score(
        self, task: Task, trajectory: Trajectory, output: str | None, messages: list[Message]
    ) -> Scored: ...


class Scorer:
    """Runs rewarders off the event loop; made within a running loop."""

    def __init__(self, rewarders: Mapping[str, Rewarder], timeout_s: float) -> None:
        self._rewarders = rewarders
        self._timeout_s = timeout_s
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self.stuck = 0

    def of(self, env: str | None) -> Rewarder | None:
        """The environment's rewarder, None where it has no reward of its own."""
        rewarder = self._rewarders.get(env or "")
        return rewarder if rewarder is not None and rewarder.names else None

    async def reward(
        self,
        trajectory: Trajectory,
        task: Task | None,
        posted: Mapping[str, float],
        claimed: Any,
    ) -> None:
        """Set a trajectory's reward; a reward that fails makes its outcome `reward_error`.

        `posted` are the parts reported while it ran, `claimed` what the agent returned. An outcome that is
        not trainable stays, and has no reward.
        """
        try:
            if claimed is not None:
                trajectory.agent_reward = number("the agent's reward", claimed)
            elif posted:
                trajectory.agent_reward = sum(posted.values())
            if trajectory.outcome.trainable:
                trajectory.reward_parts = dict(posted)
                await self._reward(trajectory, task)
        except RewardError as error:
            if trajectory.outcome.trainable:
                trajectory.outcome, trajectory.error = Outcome.REWARD_ERROR, str(error)

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
            raise RewardError(f"environment {trajectory.env!r} cannot score a session that has no task")
        elif trajectory.agent_reward is not None:
            trajectory.reward = trajectory.agent_reward
        elif any(turn.reward for turn in trajectory.turns):
            trajectory.reward = 0.0
        else:
            raise RewardError("there is no reward: the environment has none, and the agent gave none")

    async def score(self, rewarder: Rewarder, task: Task, trajectory: Trajectory) -> Scored:
        """The checked reward of one episode.

        Raises RewardError: it raised, was late, or gave no finite number.
        """

        def run() -> Scored:
            return rewarder.score(task, trajectory, trajectory.output, trajectory.messages)

        async with self._slots:
            if self.stuck >= MAX_STUCK:
                raise RewardError(f"{self.stuck} rewards hang; none is started until some of them end")
            return check(await self._in_thread(run))

    async def _in_thread(self, run: Callable[[], object]) -> object:
        """What `run` returns. Its thread counts as stuck from the moment nobody waits for it any more."""
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
            except BaseException as error:  # noqa: BLE001 - whatever an environment raises is an outcome
                raised = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
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
            if isinstance(error, RewardError):  # it says where
                raise error
            raise RewardError(f"the reward raised {type(error).__name__}: {error}{where(error)}")
        return result


def reward_turns(trajectory: Trajectory, rewards: Mapping[int, float]) -> None:
    """Set the rewards of single turns, in place of all that were there. Raises RewardError."""
    known = {turn.index: turn for turn in trajectory.turns}
    if unknown := [index for index in rewards if index not in known]:
        raise RewardError(f"turn {unknown[0]!r} was rewarded, but there is none; turns: {sorted(known)}")
    for turn in known.values():
        turn.reward = number(f"the reward of turn {turn.index}", rewards.get(turn.index, 0.0))


def check(scored: object) -> Scored:
    """A score whose numbers are finite; raises RewardError that names the one that isn't."""
    if not isinstance(scored, Scored):
        raise RewardError(f"the reward gave a {type(scored).__name__}, not a Scored")
    for name, value in [("reward", scored.reward), *scored.parts.items(), *scored.metrics.items()]:
        number(name, value)
    return scored


def number(name: str, value: object) -> float:
    """A finite number; raises RewardError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RewardError(f"{name} is {value!r}, not a finite number")
    return float(value)

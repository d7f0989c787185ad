"""Reward functions in the gateway's own process, as an environment service without states."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from tidegate.envs.service.scoring import check
from tidegate.errors import RewardError
from tidegate.gateway.environments.base import EnvironmentInfo, EpisodeLostError, Response, ToolResult
from tidegate.service.threads import in_thread
from tidegate.types import Message, Scored, Task, Trajectory


class LocalRewards:
    """Implements `EnvironmentService` with objects that have `names` and `score`.

    Args:
        rewarders: The objects by the name of their environment.
        timeout_s: Timeout of one score.
    """

    def __init__(self, rewarders: Mapping[str, Any], timeout_s: float = 5.0) -> None:
        self._rewarders = rewarders
        self._timeout_s = timeout_s

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def info(self, env: str) -> EnvironmentInfo | None:
        return EnvironmentInfo(list(self._rewarders[env].names)) if env in self._rewarders else None

    async def score(self, episode: str, task: Task, trajectory: Trajectory) -> Scored:
        rewarder = self._rewarders[trajectory.env]
        call = lambda: rewarder.score(task, trajectory, trajectory.output, trajectory.messages)  # noqa: E731
        try:
            async with asyncio.timeout(self._timeout_s):
                return check(await in_thread(call, "reward"))
        except TimeoutError:
            raise RewardError(f"the reward took longer than {self._timeout_s:g} s") from None
        except RewardError:
            raise
        except Exception as error:
            raise RewardError(f"the reward raised {type(error).__name__}: {error}") from error

    async def setup(self, episode: str, task: Task, deadline_s: float, create: bool = True) -> None:
        raise EpisodeLostError("there are no states")

    async def call_tool(
        self, episode: str, name: str, arguments: Mapping[str, Any], key: str | None = None
    ) -> ToolResult:
        raise EpisodeLostError("there are no tools")

    async def respond(self, episode: str, reply: Message, key: str | None = None) -> Response:
        raise EpisodeLostError("there is no counterpart")

    async def rank(self, group: str, task: Task, trajectories: Sequence[Trajectory]) -> list[Scored]:
        raise RewardError("there is no judge")

    async def teardown(self, episode: str) -> None: ...

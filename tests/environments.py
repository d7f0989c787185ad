"""An environment service in the gateway's process, which fails on request, and an environment with state."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from tidegate.envs.base import Done, Environment
from tidegate.envs.service.scoring import score
from tidegate.envs.tools import ToolError, text_of, tool
from tidegate.errors import RewardError
from tidegate.gateway.environments.base import EnvironmentInfo, EpisodeLostError, Response, ToolResult
from tidegate.types import Message, Scored, Task, Trajectory

TASK = Task("door", "safe", [{"role": "user", "content": "Open the safe."}], answer=[4, 7], info={"s": 1})


class Safe(Environment):
    """A safe that opens once its digits were entered; without rewards, so the agent's counts."""

    name = "safe"

    def train_task(self, index: int) -> Task:
        return TASK

    def eval_sets(self) -> Mapping[str, Sequence[Task]]:
        return {"": [TASK]}

    async def setup(self, task: Task) -> dict[str, Any]:
        return {"entered": [], "code": task.answer, "replies": 0}

    @tool
    async def enter(self, state: dict[str, Any], digit: int) -> str:
        """Enters a digit.

        Args:
            digit: From 0 to 9.
        """
        if not 0 <= digit <= 9:
            raise ToolError(f"{digit} is not a digit")
        state["entered"].append(digit)
        return "open" if state["entered"] == state["code"] else "closed"

    @tool
    async def read(self, length: int = 10) -> str:
        """Reads a manual."""
        return "é" * length

    async def respond(self, state: dict[str, Any], reply: Message) -> Message | str | Done:
        state["replies"] += 1
        return Done() if state["entered"] == state["code"] else f"It is closed ({state['replies']})."


class LocalEnvironments:
    """Hosts environments as `EnvironmentService` does."""

    def __init__(self, *environments: Environment) -> None:
        self._environments = {environment.name: environment for environment in environments}
        self.states: dict[str, Any] = {}
        self.events: list[tuple[str, str]] = []
        """Setups, checks and teardowns, with the episode."""
        self.setup_error: Exception | None = None
        self.hold: asyncio.Event | None = None
        """Setups and tool calls wait for it."""
        self.calls = 0
        self.closed = False
        self._results: dict[tuple[str, str | None], Any] = {}
        self._envs: dict[str, Environment] = {}

    def info(self, env: str) -> EnvironmentInfo | None:
        environment = self._environments.get(env)
        if environment is None:
            return None
        tools = [tool.schema() for tool in environment.tools()]
        return EnvironmentInfo(list(environment.names), tools, environment.stateful)

    def lose(self) -> None:
        """Loses all states, as a killed process does."""
        self.states.clear()
        self._results.clear()

    async def start(self) -> None: ...

    async def setup(self, episode: str, task: Task, deadline_s: float, create: bool = True) -> None:
        self.events.append(("setup" if create else "check", episode))
        if self.hold is not None:
            await self.hold.wait()
        if self.setup_error is not None:
            raise self.setup_error
        self._envs[episode] = self._environments[task.env]
        if create and episode not in self.states:
            self.states[episode] = await self._envs[episode].setup(task)
        self._state(episode)

    async def call_tool(
        self, episode: str, name: str, arguments: Mapping[str, Any], key: str | None = None
    ) -> ToolResult:
        state = self._state(episode)
        if (episode, key) in self._results:
            return self._results[episode, key]
        self.calls += 1
        if self.hold is not None:
            await self.hold.wait()
        function = next(tool.fn for tool in self._envs[episode].tools() if tool.name == name)
        try:
            value = function(state, arguments)
            result = ToolResult(text_of(await value if inspect.isawaitable(value) else value))
        except ToolError as error:
            result = ToolResult(str(error), error=True)
        if key is not None:
            self._results[episode, key] = result
        return result

    async def respond(self, episode: str, reply: Message, key: str | None = None) -> Response:
        answer = await self._envs[episode].respond(self._state(episode), reply)
        if isinstance(answer, Done):
            last = None if answer.content is None else {"role": "user", "content": answer.content}
            return Response(last, True)
        return Response({"role": "user", "content": answer} if isinstance(answer, str) else answer, False)

    async def score(self, episode: str, task: Task, trajectory: Trajectory) -> Scored:
        environment = self._environments[task.env]
        state = self._state(episode) if environment.stateful else None
        return await score(environment, task, trajectory, trajectory.output, trajectory.messages, state)

    async def rank(self, group: str, task: Task, trajectories: Sequence[Trajectory]) -> list[Scored]:
        raise RewardError("there is no judge")

    async def teardown(self, episode: str) -> None:
        self.events.append(("teardown", episode))
        self.states.pop(episode, None)

    async def close(self) -> None:
        self.closed = True

    def _state(self, episode: str) -> Any:
        if episode not in self.states:
            raise EpisodeLostError("its process ended")
        return self.states[episode]

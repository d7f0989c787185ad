"""Environments on an OpenEnv server: `env.use = "openenv:http://host:port"`.

The adapter speaks the server's protocol itself (reset and step over its WebSocket), so it needs no library.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import aiohttp

from tidegate.envs.adapters.games import Games
from tidegate.envs.adapters.library import run_apart, task_seed
from tidegate.envs.base import Done
from tidegate.envs.rewards import Grade
from tidegate.errors import ConfigError, TidegateError
from tidegate.service.http_client import unredirected
from tidegate.types import Message, Task

LIMIT_S = 30.0
"""Deadline of one message to the server, and of its answer."""
FETCHING_S = 300.0
"""Deadline of fetching the first observations of all tasks."""
MESSAGE_BYTES = 8 * 2**20


class OpenEnvError(TidegateError):
    """The server cannot be reached, or refused a message."""


@dataclass(slots=True)
class RemoteGame:
    """A connection to the server, on which it keeps one environment."""

    http: aiohttp.ClientSession
    socket: aiohttp.ClientWebSocketResponse
    rewards: float = 0.0
    steps: int = 0
    ended: bool = False

    @classmethod
    async def connect(cls, url: str) -> RemoteGame:
        http = aiohttp.ClientSession(trace_configs=unredirected())
        try:
            async with asyncio.timeout(LIMIT_S):
                socket = await http.ws_connect(f"{url}/ws", max_msg_size=MESSAGE_BYTES)
        except (aiohttp.ClientError, TimeoutError) as error:
            await http.close()
            raise OpenEnvError(f"the OpenEnv server {url} cannot be reached: {error}") from error
        return cls(http, socket)

    async def ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Sends `reset` or `step`; returns the server's observation, reward and `done`."""
        try:
            async with asyncio.timeout(LIMIT_S):
                await self.socket.send_json({"type": kind, "data": dict(data)})
                answer = await self.socket.receive_json()
        except (aiohttp.ClientError, TypeError, ValueError, TimeoutError) as error:
            raise OpenEnvError(f"the OpenEnv server gave no answer to {kind!r}: {error!r}") from error
        content: dict[str, Any] = answer["data"]
        if answer["type"] == "error":
            raise OpenEnvError(f"the OpenEnv server refused {kind!r}: {content.get('message')}")
        return content

    def grade(self) -> Grade:
        return Grade(self.rewards, {"game_steps": self.steps, "game_ended": float(self.ended)})

    async def disconnect(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            await self.socket.close()
            await self.http.close()


class OpenEnv(Games):
    """Plays the environment of an OpenEnv server; the reward is the sum of the steps' rewards.

    The server's `reset` must accept `seed`, and the same seed must give the same observation. The first
    observations of all tasks are fetched once.

    Args:
        id: Address of the server, `http://host:port`.
        action: Field of the action that receives the agent's reply; None: the action's only required field.
            A reply that is a JSON object is the whole action.
        observation: Field of the observation that the agent reads; None: the only field with text, or if
            there are several, the observation as JSON.
        reset: Further arguments of `reset`.
        tasks: Number of distinct training tasks.
        held_out: Number of held-out tasks. Their seeds never occur in training.
        seed: Determines the seeds of the tasks.
        prompt: Template of the prompt, with `{observation}`.
        system: System message before the prompt; empty: none.

    Raises:
        ConfigError: The server cannot be reached, or its actions have several fields and `action` is None.
    """

    name: ClassVar[str] = "openenv"

    def __init__(
        self,
        id: str,
        *,
        action: str | None = None,
        observation: str | None = None,
        reset: Mapping[str, Any] | None = None,
        tasks: int = 200,
        held_out: int = 100,
        seed: int = 0,
        prompt: str = "{observation}",
        system: str = "",
    ) -> None:
        self._url, self._reset, self._field = id.rstrip("/"), dict(reset or {}), observation
        if not self._url.startswith(("http://", "https://")):
            raise ConfigError(f"openenv:{id} is not an address; write openenv:http://host:port")
        super().__init__(id, held_out, seed, prompt, system)
        self._tasks = tasks
        self._action = self._checked(action)

    def start(self, seed: int) -> tuple[Any, str]:
        raise NotImplementedError("games on a server are started by setup()")

    def train_task(self, index: int) -> Task:
        return self._fetched[0][index % self._tasks]

    def train_size(self) -> int:
        return self._tasks

    def eval_sets(self) -> Mapping[str, Sequence[Task]]:
        return {"": self._fetched[1]}

    async def setup(self, task: Task) -> RemoteGame:
        game = await RemoteGame.connect(self._url)
        try:
            answer = await game.ask("reset", {**self._reset, "seed": task.info["seed"]})
            if self._messages(self._text(answer)) != list(task.messages):
                raise OpenEnvError(
                    f"reset(seed={task.info['seed']}) gave two different observations: the environment on "
                    f"{self._url} must be deterministic by the seed"
                )
        except BaseException:
            await game.disconnect()
            raise
        return game

    async def teardown(self, state: RemoteGame) -> None:
        await state.disconnect()

    async def respond(self, state: RemoteGame, reply: Message) -> Message | str | Done:
        answer = await state.ask("step", self._parsed(str(reply.get("content") or "").strip()))
        state.rewards += float(answer.get("reward") or 0.0)
        state.steps += 1
        state.ended = bool(answer.get("done"))
        return Done() if state.ended else self._text(answer)

    def _parsed(self, reply: str) -> dict[str, Any]:
        name, kind = self._action
        try:
            value = json.loads(reply)
        except ValueError:
            value = reply
        if isinstance(value, dict):
            return value
        return {name: reply if kind in (None, "string") else value}

    def _text(self, answer: Mapping[str, Any]) -> str:
        observation = dict(answer["observation"])
        observation.pop("metadata", None)
        if self._field is not None:
            return str(observation[self._field])
        texts = [value for value in observation.values() if isinstance(value, str)]
        return texts[0] if len(texts) == 1 else json.dumps(observation, ensure_ascii=False)

    @cached_property
    def _fetched(self) -> tuple[list[Task], list[Task]]:
        """Training and held-out tasks with the first observations of their seeds."""
        numbers = {"train": self._tasks, "eval": self._number}
        seeds = {name: [task_seed(self._seed, name, n) for n in range(numbers[name])] for name in numbers}

        async def fetch() -> dict[int, Task]:
            game = await RemoteGame.connect(self._url)
            try:
                tasks = {}
                for seed in (*seeds["train"], *seeds["eval"]):
                    text = self._text(await game.ask("reset", {**self._reset, "seed": seed}))
                    tasks[seed] = Task(f"{seed}", self.name, self._messages(text), info={"seed": seed})
                return tasks
            finally:
                await game.disconnect()

        tasks = run_apart(fetch(), FETCHING_S)
        return [tasks[seed] for seed in seeds["train"]], [tasks[seed] for seed in seeds["eval"]]

    def _checked(self, action: str | None) -> tuple[str, str | None]:
        """Returns the action's field for replies, and its type."""

        async def fetch() -> Any:
            async with (
                aiohttp.ClientSession(trace_configs=unredirected()) as http,
                http.get(f"{self._url}/schema") as answer,
            ):
                answer.raise_for_status()
                return await answer.json()

        try:
            schema = run_apart(fetch(), LIMIT_S)["action"]
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
            raise ConfigError(
                f"there is no OpenEnv server at {self._url}: {error or type(error).__name__}"
            ) from error
        fields = {name: one for name, one in schema.get("properties", {}).items() if name != "metadata"}
        required = [name for name in schema.get("required", fields) if name in fields]
        if action is None and len(required) != 1:
            raise ConfigError(
                f"the actions of {self._url} have the fields {', '.join(fields) or '(none)'}: name the one "
                "that receives the agent's reply by env.options.action"
            )
        name = required[0] if action is None else action
        if name not in fields:
            raise ConfigError(f"the actions of {self._url} have no field {name!r}, but {', '.join(fields)}")
        return name, fields[name].get("type")

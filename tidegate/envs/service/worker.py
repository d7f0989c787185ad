"""A worker process of the environment service: loads the environments and runs their code.

    python -m tidegate.envs.service.worker FD

reads its settings and then calls from the socket FD, and exits when it closes. A call is answered by its
id: first `started`, when its code begins to run, then `result` or `error`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec

from tidegate.envs.base import Environment, load_environment
from tidegate.envs.conversations import conversation_environment
from tidegate.envs.service import frames
from tidegate.envs.service.episodes import Episode, EpisodeError
from tidegate.envs.service.scoring import score
from tidegate.errors import ConfigError, RewardError, RewardUnavailableError, UnrewardedError
from tidegate.service.parent_death import signal_at_parent_exit
from tidegate.service.threads import started
from tidegate.types import Scored, Task, Trajectory, from_wire

log = logging.getLogger("tidegate.envs.service.worker")


class CallRunner:
    """Runs the calls that arrive on one stream, at the same time."""

    def __init__(self, environments: Mapping[str, Environment], writer: asyncio.StreamWriter) -> None:
        self._environments = environments
        self._writer = writer
        self._episodes: dict[str, Episode] = {}
        self._calls: dict[int, asyncio.Task[None]] = {}

    def receive(self, message: dict[str, Any]) -> None:
        """Begins a call, cancels one, or answers a ping."""
        number = message["id"]
        if message["op"] == "ping":
            self._answer(number, result=None)
        elif message["op"] == "cancel":
            if number in self._calls:
                self._calls[number].cancel()
        else:
            self._calls[number] = asyncio.create_task(self._run(number, message))

    async def _run(self, number: int, message: dict[str, Any]) -> None:
        threads: list[threading.Thread] = []
        started.set(threads)
        try:
            self._answer(number, result=await self._handle(number, message))
        except asyncio.CancelledError:
            self._answer(
                number, error="cancelled", kind="cancelled", stuck=any(t.is_alive() for t in threads)
            )
        except UnrewardedError as error:
            self._answer(number, error=str(error), kind="unrewarded")
        except RewardUnavailableError as error:
            self._answer(number, error=str(error), kind="unavailable")
        except RewardError as error:
            self._answer(number, error=str(error), kind="reward")
        except EpisodeError as error:
            self._answer(number, error=str(error), kind="episode")
        except Exception as error:
            log.exception("a call %r failed", message["op"])
            self._answer(number, error=f"{type(error).__name__}: {error}", kind="episode")
        finally:
            self._calls.pop(number, None)

    async def _handle(self, number: int, message: dict[str, Any]) -> Any:
        name: str = message["episode"]
        match message["op"]:
            case "setup":
                task = msgspec.convert(json.loads(message["task"]), Task)
                episode = Episode(self._environments[task.env], task)
                self._started(number)
                await episode.setup()
                self._episodes[name] = episode
            case "tool":
                episode, arguments = self._episodes[name], message["arguments"]
                return await episode.once(
                    message["key"],
                    lambda: episode.call_tool(message["tool"], arguments),
                    lambda: self._started(number),
                )
            case "respond":
                episode = self._episodes[name]
                return await episode.once(
                    message["key"], lambda: episode.respond(message["reply"]), lambda: self._started(number)
                )
            case "score":
                return await self._score(number, message)
            case "teardown":
                await self._episodes.pop(name).teardown(lambda: self._started(number))
            case op:
                raise ValueError(f"unknown operation {op!r}")
        return None

    async def _score(self, number: int, message: dict[str, Any]) -> Any:
        task = msgspec.convert(json.loads(message["task"]), Task)
        ended = from_wire(message["trajectory"], Trajectory)
        environment, episode = self._environments[ended.env], self._episodes.get(message["episode"])

        async def compute(state: Any = None) -> Any:
            scored = await score(environment, task, ended, ended.output, ended.messages, state)
            return msgspec.to_builtins(plain(scored))

        if episode is None:
            self._started(number)
            return await compute()
        # After a tool that the agent did not wait for, so that nothing else changes the state meanwhile.
        return await episode.once(None, lambda: compute(episode.state), lambda: self._started(number))

    def _started(self, number: int) -> None:
        self._send({"id": number, "event": "started"})

    def _answer(self, number: int, **answer: Any) -> None:
        try:
            self._send({"id": number, "event": "answer", **answer})
        except (TypeError, ValueError, OverflowError) as error:
            self._send(
                {"id": number, "event": "answer", "kind": "episode", "error": f"not serialisable: {error}"}
            )

    def _send(self, message: dict[str, Any]) -> None:
        self._writer.write(frames.pack(message))


def plain(scored: Scored) -> dict[str, Any]:
    """Returns a score with Python's own numbers, which may be of NumPy."""
    return {
        "reward": float(scored.reward),
        "parts": {name: float(value) for name, value in scored.parts.items()},
        "metrics": {name: float(value) for name, value in scored.metrics.items()},
        "turn_rewards": {int(turn): float(value) for turn, value in scored.turn_rewards.items()},
        "policy_rewards": {name: float(value) for name, value in scored.policy_rewards.items()},
    }


def load(settings: Mapping[str, Any]) -> dict[str, Environment]:
    """Returns the environments by the names in their tasks. Raises ConfigError."""
    environments: dict[str, Environment] = {}
    if settings["use"]:
        environments |= load_environment(settings["use"], settings["options"]).rewarders()
    if settings["conversation_rewards"] or not settings["use"]:  # a judge alone scores conversations
        limits = settings["reward_range"]
        conversations = conversation_environment(
            settings["conversation_rewards"], None if limits is None else (limits[0], limits[1])
        )
        environments[conversations.name] = conversations
    return environments


def describe(environments: Mapping[str, Environment]) -> dict[str, Any]:
    """Returns the description of each environment for a gateway. Raises ConfigError."""
    return {
        name: {
            "rewards": list(environment.names),
            "stateful": environment.stateful,
            "tools": [tool.schema() for tool in environment.tools()],
        }
        for name, environment in environments.items()
    }


async def serve(sock: socket.socket) -> None:
    """Loads the environments that the first message names, and runs calls until the socket closes."""
    reader, writer = await asyncio.open_connection(sock=sock)
    settings = await frames.read(reader)
    if settings is None:
        return
    try:
        environments = load(settings)
        about: dict[str, Any] = {"environments": describe(environments)}
    except ConfigError as error:
        about = {"error": str(error)}
    writer.write(frames.pack(about))
    if "error" not in about:
        worker = CallRunner(environments, writer)
        while (message := await frames.read(reader)) is not None:
            worker.receive(message)
    with suppress(ConnectionError):
        await writer.drain()


def main() -> None:
    signal_at_parent_exit(signal.SIGKILL)  # code that holds the interpreter's lock reads no closed socket
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    asyncio.run(serve(socket.socket(fileno=int(sys.argv[1]))))
    os._exit(0)  # threads that hang do not keep the process running


if __name__ == "__main__":
    main()

"""Environments that the tests of the environment service load by file."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.interpreter_lock import hold_interpreter_lock
from tidegate.envs.base import Done, Environment
from tidegate.envs.rewards import Reward
from tidegate.envs.tools import ToolError, tool
from tidegate.errors import InfrastructureError
from tidegate.types import Message, Task


async def total(state: dict[str, Any], output: str | None) -> float:
    if (output or "").startswith("lock"):
        act(output)
    return float(state["total"])


def note_beginning(path: str) -> None:
    with open(path, "a") as file:
        file.write("x")


class Counter(Environment):
    """Counts; its tools and its counterpart fail on request."""

    name = "counter"
    rewards = (Reward("total", total),)

    def train_task(self, index: int) -> Task:
        return Task(f"t{index}", "counter", [])

    def eval_sets(self) -> Mapping[str, Sequence[Task]]:
        return {"": []}

    async def setup(self, task: Task) -> dict[str, Any]:
        if task.info.get("fails"):
            raise ValueError("no database")
        if task.info.get("late"):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
        return {"total": 0, "file": task.info.get("file")}

    @tool
    async def add(self, state: dict[str, Any], number: int) -> str:
        """Adds a number.

        Args:
            number: The number.
        """
        if number < 0:
            raise ToolError("only numbers ≥ 0")
        state["total"] += number
        return str(state["total"])

    @tool
    async def add_later(self, state: dict[str, Any], number: int, seconds: float) -> str:
        """Adds a number after a while; each beginning adds a byte to a file."""
        note_beginning(f"{state['file']}.begun")
        await asyncio.sleep(seconds)
        state["total"] += number
        return str(state["total"])

    @tool
    def process(self) -> int:
        """Returns the process's id."""
        return os.getpid()

    @tool
    def fork(self) -> int:
        """Starts a process that has the worker's open files; returns its id."""
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        return child

    @tool
    def wait(self, seconds: float) -> str:
        """Waits in a thread."""
        time.sleep(seconds)
        return "done"

    @tool
    async def long(self, length: int) -> str:
        """Returns a long text."""
        return "x" * length

    @tool
    async def outage(self) -> str:
        """Fails as a service does."""
        raise InfrastructureError("the shop's server is down")

    async def respond(self, state: dict[str, Any], reply: Message) -> Message | str | Done:
        if reply["content"] == "bad":
            return 7  # type: ignore[return-value]
        return "more" if state["total"] < 3 else Done("thanks")

    async def teardown(self, state: dict[str, Any]) -> None:
        if state["file"]:
            Path(state["file"]).write_text(str(state["total"]))  # noqa: ASYNC240


def _note(file: str, line: str) -> None:
    with Path(file).open("a") as notes:
        notes.write(f"{line}\n")


def act(output: str | None) -> float:
    """Does what the agent's output says."""
    word, _, argument = (output or "").partition(" ")
    if word == "sleep":
        time.sleep(float(argument))
    elif word == "lock":
        if argument:
            _note(argument, "scored")
        hold_interpreter_lock()
    elif word == "exit":
        os._exit(3)
    elif word == "fork":  # the child has the worker's open files
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        _note(argument, str(child))
        os._exit(3)
    elif word == "note":
        _note(argument, "scored")
        time.sleep(0.5)
    elif word == "process":
        _note(argument, str(os.getpid()))
        time.sleep(0.5)
    elif word == "fetch":
        urllib.request.urlopen(argument, timeout=5.0)
    elif word == "raise":
        raise ValueError(argument)
    return 1.0


class Acting(Environment):
    """Without state; its reward does what the output says."""

    name = "acting"
    rewards = (Reward("act", act),)

    def train_task(self, index: int) -> Task:
        return Task(f"t{index}", "acting", [])

    def eval_sets(self) -> Mapping[str, Sequence[Task]]:
        return {"": []}

"""The demo's agent, and `chat`, which always fail on some training tasks, chosen by task id."""

from __future__ import annotations

import asyncio
import zlib

from tidegate.agents.base import Result, Session
from tidegate.agents.chat import ChatAgent
from tidegate.agents.solver import Solver
from tidegate.types import TaskView

RAISES, HANGS, SILENT = 10, 5, 5
"""Percentage of the training tasks by kind of failure."""


def poison_of(task_id: str) -> str | None:
    """The kind of failure of a task, the same for every attempt."""
    if "train" not in task_id:
        return None
    drawn = zlib.crc32(task_id.encode()) % 100
    if drawn < RAISES:
        return "raises"
    if drawn < RAISES + HANGS:
        return "hangs"
    return "silent" if drawn < RAISES + HANGS + SILENT else None


async def silent(task: TaskView) -> bool:
    """Raises or hangs on some tasks; returns whether the agent should make no call on this one."""
    poison = poison_of(task.id)
    if poison == "raises":
        raise RuntimeError("this task always raises")
    if poison == "hangs":
        await asyncio.Event().wait()
    return poison == "silent"


class PoisonedSolver(Solver):
    async def run(self, task: TaskView, session: Session) -> Result:
        return Result("#### 0") if await silent(task) else await super().run(task, session)


class PoisonedChat(ChatAgent):
    async def run(self, task: TaskView, session: Session) -> str | None:
        return "#### 0" if await silent(task) else await super().run(task, session)

"""The demo's solver, which always fails on some training tasks, chosen by task id."""

from __future__ import annotations

import asyncio
import zlib

from tidegate.agents.base import Result, Session
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


class PoisonedSolver(Solver):
    async def run(self, task: TaskView, session: Session) -> Result:
        poison = poison_of(task.id)
        if poison == "raises":
            raise RuntimeError("this task always raises")
        if poison == "hangs":
            await asyncio.Event().wait()
        if poison == "silent":
            return Result("#### 0")
        return await super().run(task, session)

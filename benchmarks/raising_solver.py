"""The demo's solver, on whose training tasks one in twelve always raises: which ones, their ids decide."""

from __future__ import annotations

import zlib

from tidegate.agents.base import Result, Session
from tidegate.agents.solver import Solver
from tidegate.types import TaskView


class RaisingSolver(Solver):
    async def run(self, task: TaskView, session: Session) -> Result:
        if "train" in task.id and zlib.crc32(task.id.encode()) % 12 == 0:
            raise RuntimeError("this task always raises")
        return await super().run(task, session)

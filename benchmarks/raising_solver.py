"""The demo's solver, which always raises on one in twelve training tasks, chosen by task id."""

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

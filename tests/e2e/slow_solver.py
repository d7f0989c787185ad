"""An agent whose episodes take longer than a step of the trainer: a worker has one at any time."""

from __future__ import annotations

import asyncio

from tidegate.agents.base import Result, Session
from tidegate.agents.solver import Solver
from tidegate.types import TaskView


class SlowSolver(Solver):
    async def run(self, task: TaskView, session: Session) -> Result | None:
        await asyncio.sleep(1)  # the work of an agent between its calls
        return await super().run(task, session)

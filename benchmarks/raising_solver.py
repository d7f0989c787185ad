"""Agents of demos, which always raise on one in twelve training tasks, chosen by task id.

`raising_duo` gives all episodes of another twelfth the reward 0, so that their groups are filtered.
"""

from __future__ import annotations

import zlib

from tidegate.agents.base import Result, Session
from tidegate.agents.chat import ChatAgent
from tidegate.agents.solver import Solver
from tidegate.loading import load_object
from tidegate.types import TaskView

RAISES, ALIKE = range(2)


def kind(task: TaskView) -> int | None:
    return zlib.crc32(task.id.encode()) % 12 if "train" in task.id else None


def check(task: TaskView) -> None:
    if kind(task) == RAISES:
        raise RuntimeError("this task always raises")


class RaisingSolver(Solver):
    async def run(self, task: TaskView, session: Session) -> Result:
        check(task)
        return await super().run(task, session)


class RaisingChat(ChatAgent):
    async def run(self, task: TaskView, session: Session) -> str | None:
        check(task)
        return await super().run(task, session)


async def raising_duo(task: TaskView, session: Session) -> str:
    check(task)
    if kind(task) == ALIKE:
        await session.openai().chat.completions.create(model="solver", messages=task.messages)
        return "no proposal"
    output: str = await load_object("examples/duo/agent.py:agent", {}, "agent")(task, session)
    return output

"""The solver with a slow calculator."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from tidegate.agents.base import Agent, Result, Session
from tidegate.agents.solver import TOOLS, use_tool
from tidegate.types import TaskView

SHORTEST_S, LONGEST_S = 0.1, 3.0


class SlowSolver(Agent):
    """Each tool call sleeps for a log-normal time, drawn with the session's seed; 0 disables the sleep."""

    def __init__(self, median_s: float = 0.5, sigma: float = 0.6, max_turns: int = 6) -> None:
        self.median_s = median_s
        self.sigma = sigma
        self.max_turns = max_turns

    async def run(self, task: TaskView, session: Session) -> Result:
        llm, dice = session.openai(), random.Random(session.seed)
        messages: list[Any] = [*task.messages]
        content, slept = None, 0.0
        for _ in range(self.max_turns):
            reply = await llm.chat.completions.create(model=session.model, messages=messages, tools=TOOLS)
            message = reply.choices[0].message
            content = message.content
            if not message.tool_calls:
                break
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls:
                slept += await self._wait(dice)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": use_tool(call)})
        return Result(content, metrics={"slept_s": slept})

    async def _wait(self, dice: random.Random) -> float:
        if self.median_s == 0:
            return 0.0
        drawn = self.median_s * dice.lognormvariate(0.0, self.sigma)
        seconds = min(LONGEST_S, max(SHORTEST_S, drawn))
        await asyncio.sleep(seconds)
        return seconds

"""The demo's word problems with a calculator that the environment serves, and a state for each episode."""

from __future__ import annotations

import zlib
from typing import Any

from tidegate.agents.calculator import calculate
from tidegate.envs.arithmetic import Arithmetic
from tidegate.envs.rewards import Reward, exact_answer
from tidegate.envs.tools import ToolError, tool
from tidegate.types import Task


async def right(output: str | None, answer: Any, state: dict[str, Any]) -> float:
    if not state["open"]:
        raise RuntimeError("the state was torn down before the episode was scored")
    return exact_answer(output, answer)


class Desk(Arithmetic):
    rewards = (Reward("right", right),)

    async def setup(self, task: Task) -> dict[str, Any]:
        return {"open": True, "results": []}

    @tool
    async def calculator(self, state: dict[str, Any], expression: str) -> str:
        """Computes an arithmetic expression.

        Args:
            expression: Such as (12 + 3) * 4.
        """
        try:
            state["results"].append(calculate(expression))
        except ValueError as error:
            raise ToolError(f"error: {error}") from error
        return str(state["results"][-1])

    async def teardown(self, state: dict[str, Any]) -> None:
        state["open"] = False


async def coin(output: str | None) -> float:
    return float(zlib.crc32((output or "").encode()) % 2)


class Coin(Arithmetic):
    """Rewards the replies of a model that learns nothing."""

    rewards = (Reward("coin", coin),)

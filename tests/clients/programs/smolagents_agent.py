"""A smolagents ToolCallingAgent on `OpenAIModel`."""

from __future__ import annotations

import importlib.metadata
import json
from typing import Any

from calculator import MODEL, calculate
from calculator import messages as task_messages
from smolagents import OpenAIModel, ToolCallingAgent, tool

calls: list[Any] = []


@tool
def calculator(expression: str) -> str:
    """Works out an expression.

    Args:
        expression: Numbers, + - * / and parentheses.
    """
    calls.append(["calculator", {"expression": expression}])
    return calculate(expression)


if __name__ == "__main__":
    agent = ToolCallingAgent(tools=[calculator], model=OpenAIModel(MODEL), max_steps=4, verbosity_level=0)
    answer = agent.run(task_messages()[-1]["content"])
    print(
        json.dumps(
            {"answer": str(answer), "calls": calls, "version": importlib.metadata.version("smolagents")}
        )
    )

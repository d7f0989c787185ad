"""The built-in agent `solver`: solves word problems with a calculator."""

from __future__ import annotations

import json
from typing import Any

from tidegate.agents.base import Agent, Result, Session
from tidegate.agents.calculator import calculate
from tidegate.types import TaskView

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Work out an arithmetic expression, such as (12 + 3) * 4.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]


class Solver(Agent):
    """Lets the model call a calculator until it answers.

    Args:
        max_turns: Limit of the model's replies.
        instructions: System message before the task, such as the answer's format (`#### number`) for models
            that were not trained on it.
    """

    def __init__(self, max_turns: int = 6, instructions: str | None = None) -> None:
        self.max_turns = max_turns
        self.instructions = instructions

    async def run(self, task: TaskView, session: Session) -> Result:
        llm = session.openai()
        messages: list[Any] = [*task.messages]
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        metrics = {"turns": 0.0, "tool_calls": 0.0, "tool_errors": 0.0}
        content = None
        for _ in range(self.max_turns):
            reply = await llm.chat.completions.create(model=session.model, messages=messages, tools=TOOLS)
            message = reply.choices[0].message
            content = message.content
            metrics["turns"] += 1
            if not message.tool_calls:
                break
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls:
                text = use_tool(call)
                metrics["tool_calls"] += 1
                metrics["tool_errors"] += text.startswith("error:")
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
        return Result(content, metrics=metrics)


def use_tool(call: Any) -> str:
    """Returns the calculator's result, or the text of an error for the model."""
    if call.type != "function" or call.function.name != "calculator":
        return "error: there is no such tool; the only one is calculator(expression)"
    try:
        expression = json.loads(call.function.arguments)["expression"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return 'error: the arguments must be {"expression": "..."}'
    try:
        return calculate(str(expression))
    except ValueError as error:
        return f"error: {error}"

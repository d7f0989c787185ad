"""A plain agent on the OpenAI Agents SDK; only the model's address and key come from the session."""

from __future__ import annotations

from typing import Any

from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool

from tidegate.agents.calculator import calculate


@function_tool
def calculator(expression: str) -> str:
    """Works out an arithmetic expression."""
    try:
        return calculate(expression)
    except ValueError as error:
        return f"error: {error}"


async def agent(task: Any, session: Any) -> str:
    model = OpenAIChatCompletionsModel(session.model, session.openai())
    solver = Agent(name="solver", model=model, tools=[calculator])
    # The SDK would send traces to OpenAI's servers.
    result = await Runner.run(solver, task.messages, max_turns=6, run_config=RunConfig(tracing_disabled=True))
    return str(result.final_output)

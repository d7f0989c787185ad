"""A plain LangGraph agent; only the model's address and key come from the session."""

from __future__ import annotations

from typing import Any

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from tidegate.agents.calculator import calculate


@tool
def calculator(expression: str) -> str:
    """Works out an arithmetic expression."""
    try:
        return calculate(expression)
    except ValueError as error:
        return f"error: {error}"


async def agent(task: Any, session: Any) -> str:
    model = ChatOpenAI(model=session.model, base_url=session.base_url, api_key=session.api_key)
    graph = create_agent(model, tools=[calculator])
    state = await graph.ainvoke({"messages": task.messages}, {"recursion_limit": 12})
    return str(state["messages"][-1].text)

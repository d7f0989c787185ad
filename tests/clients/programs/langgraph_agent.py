"""A LangGraph agent: `chat` or `responses` (`langchain-openai`), `messages` (`langchain-anthropic`)."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from typing import Any

from calculator import MODEL, calculate
from calculator import messages as task_messages
from langchain.agents import create_agent
from langchain_core.tools import tool

calls: list[Any] = []


@tool
def calculator(expression: str) -> str:
    """Works out an expression."""
    calls.append(["calculator", {"expression": expression}])
    return calculate(expression)


def model(dialect: str, stream: bool) -> Any:
    if dialect == "messages":
        from langchain_anthropic import ChatAnthropic

        return ChatAnthropic(model_name=MODEL, max_tokens_to_sample=64, streaming=stream)
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model=MODEL, use_responses_api=dialect == "responses", streaming=stream)


if __name__ == "__main__":
    agent = create_agent(model(sys.argv[1], "stream" in sys.argv[2:]), tools=[calculator])
    state = agent.invoke({"messages": task_messages()})
    print(
        json.dumps(
            {
                "answer": state["messages"][-1].text,
                "calls": calls,
                "version": importlib.metadata.version("langgraph"),
            }
        )
    )

"""An AutoGen AssistantAgent: `chat` or `messages`."""

from __future__ import annotations

import asyncio
from typing import Any

from autogen_agentchat.agents import AssistantAgent
from calculator import MODEL, MOST_TURNS
from solving import DIALECT, INSTRUCTIONS, QUESTIONS, STREAM, calculator, report

INFO: Any = {
    "vision": False,
    "function_calling": True,
    "json_output": False,
    "family": "unknown",
    "structured_output": False,
}


def client() -> Any:
    if DIALECT == "messages":
        from autogen_ext.models.anthropic import AnthropicChatCompletionClient

        return AnthropicChatCompletionClient(model=MODEL, max_tokens=500, model_info=INFO)
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    return OpenAIChatCompletionClient(model=MODEL, model_info=INFO)


async def run() -> list[Any]:
    agent = AssistantAgent(
        "solver",
        client(),
        tools=[calculator],
        system_message=INSTRUCTIONS,
        max_tool_iterations=MOST_TURNS,
        model_client_stream=STREAM,
    )
    results: list[Any] = [await agent.run(task=question) for question in QUESTIONS]
    return [result.messages[-1].content for result in results]


if __name__ == "__main__":
    report("autogen-agentchat", *asyncio.run(run()))

"""An agent on Microsoft's Agent Framework: `chat`, `responses` or `messages`."""

from __future__ import annotations

import asyncio
from typing import Any

from agent_framework import Agent
from calculator import MODEL
from solving import DIALECT, INSTRUCTIONS, QUESTIONS, STREAM, calculator, report


def client() -> Any:
    if DIALECT == "messages":
        from agent_framework.anthropic import AnthropicClient

        return AnthropicClient(model=MODEL)
    if DIALECT == "responses":
        from agent_framework.openai import OpenAIChatClient

        return OpenAIChatClient(model=MODEL)
    from agent_framework.openai import OpenAIChatCompletionClient

    return OpenAIChatCompletionClient(model=MODEL)


async def run() -> list[str]:
    agent = Agent(client(), INSTRUCTIONS, name="solver", tools=[calculator])
    session, answers = agent.create_session(), []
    for question in QUESTIONS:
        if STREAM:
            stream = agent.run(question, stream=True, session=session)
            async for _ in stream:
                pass
            response = await stream.get_final_response()
        else:
            response = await agent.run(question, session=session)
        answers.append(response.messages[-1].text)
    return answers


if __name__ == "__main__":
    report("agent-framework-core", *asyncio.run(run()))

"""A pydantic-ai agent: `chat`, `responses` or `messages`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable
from typing import Any

from calculator import MODEL
from pydantic_ai import Agent
from solving import DIALECT, INSTRUCTIONS, QUESTIONS, STREAM, calculator, report


def model() -> Any:
    if DIALECT == "messages":
        from pydantic_ai.models.anthropic import AnthropicModel

        return AnthropicModel(MODEL)
    if DIALECT == "responses":
        from pydantic_ai.models.openai import OpenAIResponsesModel

        return OpenAIResponsesModel(MODEL)
    from pydantic_ai.models.openai import OpenAIChatModel

    return OpenAIChatModel(MODEL)


async def drain(_: Any, events: AsyncIterable[Any]) -> None:
    """A handler of events makes the agent ask for streams."""
    async for _event in events:
        pass


async def run() -> list[str]:
    agent = Agent(model(), instructions=INSTRUCTIONS, tools=[calculator])
    answers, history = [], None
    for question in QUESTIONS:
        handler = drain if STREAM else None
        result = await agent.run(question, message_history=history, event_stream_handler=handler)
        history = result.all_messages()
        answers.append(result.output)
    return answers


if __name__ == "__main__":
    report("pydantic-ai-slim", *asyncio.run(run()))

"""A LlamaIndex FunctionAgent: `chat`, `responses` or `messages`."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from calculator import MODEL
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.memory import ChatMemoryBuffer
from solving import DIALECT, INSTRUCTIONS, QUESTIONS, STREAM, calculator, report

ACCESS = {
    "api_base": os.environ["OPENAI_BASE_URL"],
    "api_key": os.environ["OPENAI_API_KEY"],
}  # it reads OPENAI_API_BASE


def model() -> Any:
    if DIALECT == "messages":
        from llama_index.llms.anthropic import Anthropic

        return Anthropic(model="claude-sonnet-4-5", max_tokens=500)
    if DIALECT == "responses":
        from llama_index.llms.openai import OpenAIResponses

        return OpenAIResponses(model="gpt-4.1", **ACCESS)
    from llama_index.llms.openai_like import OpenAILike

    return OpenAILike(model=MODEL, is_chat_model=True, is_function_calling_model=True, **ACCESS)


async def run() -> list[str]:
    agent = FunctionAgent(
        tools=[calculator], llm=model(), system_prompt=INSTRUCTIONS, streaming=STREAM, timeout=200
    )
    memory = ChatMemoryBuffer.from_defaults(token_limit=10_000)
    return [str(await agent.run(question, memory=memory)) for question in QUESTIONS]


if __name__ == "__main__":
    report("llama-index-core", *asyncio.run(run()))

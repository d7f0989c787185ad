"""A ChatCompletionAgent of Semantic Kernel: `chat` or `messages`."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from calculator import MODEL
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.functions import kernel_function
from solving import DIALECT, INSTRUCTIONS, QUESTIONS, STREAM, calculator, report


class Sums:
    @kernel_function(name="calculator", description="Works out an expression.")
    def calculate(self, expression: Annotated[str, "Numbers, + - * / and parentheses."]) -> str:
        return calculator(expression)


def service() -> Any:
    if DIALECT == "messages":
        from semantic_kernel.connectors.ai.anthropic import AnthropicChatCompletion

        return AnthropicChatCompletion(ai_model_id=MODEL)
    from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion

    return OpenAIChatCompletion(ai_model_id=MODEL)


async def run() -> list[str]:
    agent = ChatCompletionAgent(service=service(), name="solver", instructions=INSTRUCTIONS, plugins=[Sums()])
    answers, thread = [], None
    for question in QUESTIONS:
        if STREAM:
            parts = [part async for part in agent.invoke_stream(question, thread=thread)]
        else:
            parts = [await agent.get_response(question, thread=thread)]
        thread = parts[-1].thread
        answers.append("".join(str(part.content) for part in parts))
    return answers


if __name__ == "__main__":
    report("semantic-kernel", *asyncio.run(run()))

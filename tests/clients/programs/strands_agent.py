"""A Strands agent: `chat`, `responses` or `messages`."""

from __future__ import annotations

from typing import Any

from calculator import MODEL
from solving import DIALECT, INSTRUCTIONS, QUESTIONS, STREAM, calculator, report
from strands import Agent, tool


def model() -> Any:
    if DIALECT == "messages":
        from strands.models.anthropic import AnthropicModel

        return AnthropicModel(model_id=MODEL, max_tokens=500)
    if DIALECT == "responses":
        from strands.models.openai_responses import OpenAIResponsesModel

        return OpenAIResponsesModel(model_id=MODEL)
    from strands.models.openai import OpenAIModel

    return OpenAIModel(model_id=MODEL, stream=STREAM)


if __name__ == "__main__":
    agent = Agent(model(), tools=[tool(calculator)], system_prompt=INSTRUCTIONS, callback_handler=None)
    report("strands-agents", *(str(agent(question)).strip() for question in QUESTIONS))

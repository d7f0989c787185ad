"""A CAMEL ChatAgent: `chat`, `responses` or `messages`."""

from __future__ import annotations

import os
from typing import Any

from calculator import MODEL
from camel.agents import ChatAgent
from camel.models import AnthropicModel, OpenAICompatibleModel, OpenAIModel
from camel.toolkits import FunctionTool
from camel.utils import BaseTokenCounter
from solving import DIALECT, INSTRUCTIONS, QUESTION, STREAM, calculator, report


class Characters(BaseTokenCounter):
    """A rough count: CAMEL's own counters fetch an encoding."""

    def count_tokens_from_messages(self, messages: list[Any]) -> int:
        return len(str(messages)) // 4

    def encode(self, text: str) -> list[int]:
        return [ord(one) for one in text]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))


def model() -> Any:
    options: dict[str, Any] = {"stream": STREAM}
    if DIALECT == "messages":
        url = os.environ["ANTHROPIC_BASE_URL"]
        return AnthropicModel(MODEL, {**options, "max_tokens": 1000}, url=url, token_counter=Characters())
    access = {"url": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
    if DIALECT == "responses":
        return OpenAIModel(MODEL, options, api_mode="responses", token_counter=Characters(), **access)
    return OpenAICompatibleModel(MODEL, options, token_counter=Characters(), **access)


if __name__ == "__main__":
    agent = ChatAgent(INSTRUCTIONS, model=model(), tools=[FunctionTool(calculator)], stream_accumulate=True)
    reply = agent.step(QUESTION)
    if STREAM:
        *_, reply = reply
    report("camel-ai", reply.msgs[-1].content)

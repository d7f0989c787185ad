"""A Haystack Agent: `chat`, `responses` or `messages`."""

from __future__ import annotations

from typing import Any

from calculator import MODEL
from haystack.components.agents import Agent
from haystack.dataclasses import ChatMessage, ChatRole
from haystack.tools import create_tool_from_function
from solving import DIALECT, INSTRUCTIONS, QUESTIONS, STREAM, calculator, report


def generator() -> Any:
    if DIALECT == "messages":
        from haystack_integrations.components.generators.anthropic import AnthropicChatGenerator

        return AnthropicChatGenerator(model=MODEL)
    if DIALECT == "responses":
        from haystack.components.generators.chat import OpenAIResponsesChatGenerator

        return OpenAIResponsesChatGenerator(model=MODEL)
    from haystack.components.generators.chat import OpenAIChatGenerator

    return OpenAIChatGenerator(model=MODEL)


def ignore(_: Any) -> None:
    """A callback makes the agent ask for streams."""


if __name__ == "__main__":
    agent = Agent(
        chat_generator=generator(),
        tools=[create_tool_from_function(calculator)],
        system_prompt=INSTRUCTIONS,
        streaming_callback=ignore if STREAM else None,
    )
    history, answers = [], []
    for question in QUESTIONS:
        result = agent.run(messages=[*history, ChatMessage.from_user(question)])
        # The agent puts its system prompt before what it is given.
        history = [message for message in result["messages"] if not message.is_from(ChatRole.SYSTEM)]
        answers.append(result["last_message"].text)
    report("haystack-ai", *answers)

"""An agno agent: `chat`, `responses` or `messages`."""

from __future__ import annotations

from typing import Any

from agno.agent import Agent
from agno.db.in_memory import InMemoryDb
from calculator import MODEL
from solving import DIALECT, INSTRUCTIONS, QUESTIONS, STREAM, calculator, report


def model() -> Any:
    if DIALECT == "messages":
        from agno.models.anthropic import Claude

        return Claude(id=MODEL, max_tokens=500)
    if DIALECT == "responses":
        from agno.models.openai import OpenAIResponses

        return OpenAIResponses(id=MODEL)
    from agno.models.openai import OpenAIChat

    return OpenAIChat(id=MODEL)


agent = Agent(
    model=model(),
    instructions=INSTRUCTIONS,
    tools=[calculator],
    db=InMemoryDb(),
    session_id="sums",
    add_history_to_context=True,
    telemetry=False,
)


def ask(question: str) -> str:
    if not STREAM:
        return str(agent.run(question).content)
    texts = [event.content for event in agent.run(question, stream=True) if event.event == "RunContent"]
    return "".join(text for text in texts if text)


if __name__ == "__main__":
    report("agno", *map(ask, QUESTIONS))

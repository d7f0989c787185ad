"""A deepagents agent: `chat` or `responses` (`langchain-openai`), `messages` (`langchain-anthropic`)."""

from __future__ import annotations

from typing import Any

from calculator import MODEL
from deepagents import create_deep_agent
from solving import DIALECT, INSTRUCTIONS, QUESTION, STREAM, calculator, report


def model() -> Any:
    if DIALECT == "messages":
        from langchain_anthropic import ChatAnthropic

        return ChatAnthropic(model_name=MODEL, max_tokens_to_sample=1000, streaming=STREAM)
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model=MODEL, use_responses_api=DIALECT == "responses", streaming=STREAM)


if __name__ == "__main__":
    agent = create_deep_agent(model(), tools=[calculator], system_prompt=INSTRUCTIONS)
    state = agent.invoke({"messages": [{"role": "user", "content": QUESTION}]})
    report("deepagents", state["messages"][-1].text)

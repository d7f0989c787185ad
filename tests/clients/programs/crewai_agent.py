"""A crew of one CrewAI agent: `chat`, `responses` or `messages`."""

from __future__ import annotations

import os
from typing import Any

os.environ.update(CREWAI_DISABLE_TELEMETRY="true", CREWAI_TRACING_ENABLED="false", OTEL_SDK_DISABLED="true")
import solving
from calculator import MODEL
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from solving import DIALECT, INSTRUCTIONS, QUESTION, STREAM, report


def model() -> Any:
    if DIALECT == "messages":
        access = {"base_url": os.environ["ANTHROPIC_BASE_URL"], "api_key": os.environ["ANTHROPIC_API_KEY"]}
        return LLM(model=MODEL, provider="anthropic", stream=STREAM, max_tokens=1000, **access)
    api = "responses" if DIALECT == "responses" else "completions"
    access = {"base_url": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
    return LLM(model=MODEL, provider="openai", stream=STREAM, api=api, **access)


if __name__ == "__main__":
    agent = Agent(
        role="solver",
        goal=INSTRUCTIONS,
        backstory="You calculate.",
        tools=[tool(solving.calculator)],
        llm=model(),
    )
    task = Task(description=QUESTION, expected_output="The number after ####.", agent=agent)
    crew = Crew(agents=[agent], tasks=[task])
    report("crewai", crew.kickoff().raw)

"""An agent on Google's ADK: `chat` through its LiteLlm, `messages` through its AnthropicLlm."""

from __future__ import annotations

import asyncio
from typing import Any

from calculator import MODEL
from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.runners import InMemoryRunner
from google.genai.types import Content, Part
from solving import DIALECT, INSTRUCTIONS, QUESTIONS, STREAM, calculator, report


def model() -> Any:
    if DIALECT == "messages":
        from google.adk.models.anthropic_llm import AnthropicLlm

        return AnthropicLlm(model=MODEL, max_tokens=500)
    from google.adk.models.lite_llm import LiteLlm

    return LiteLlm(model=f"openai/{MODEL}")


async def run() -> list[str]:
    agent = LlmAgent(name="solver", model=model(), instruction=INSTRUCTIONS, tools=[calculator])
    runner = InMemoryRunner(agent=agent, app_name="sums")
    session = await runner.session_service.create_session(app_name="sums", user_id="user")
    way = RunConfig(streaming_mode=StreamingMode.SSE if STREAM else StreamingMode.NONE)
    answers = []
    for question in QUESTIONS:
        message = Content(role="user", parts=[Part(text=question)])
        async for event in runner.run_async(
            user_id="user", session_id=session.id, new_message=message, run_config=way
        ):
            if event.is_final_response() and event.content:
                texts = [part.text or "" for part in event.content.parts or [] if not part.thought]
        answers.append("".join(texts))
    return answers


if __name__ == "__main__":
    report("google-adk", *asyncio.run(run()))

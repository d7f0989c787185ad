"""An agent on the OpenAI Agents SDK, whose package is `agents`: `chat` or `responses`, and `stream`."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import sys
from typing import Any

from agents import Agent, ModelSettings, Runner, function_tool, set_default_openai_api, set_tracing_disabled
from calculator import MODEL, calculate
from calculator import messages as task_messages

calls: list[Any] = []


@function_tool
def calculator(expression: str) -> str:
    """Works out an expression."""
    calls.append(["calculator", {"expression": expression}])
    return calculate(expression)


async def run(stream: bool) -> str:
    agent = Agent(name="solver", model=MODEL, tools=[calculator], model_settings=ModelSettings())
    if not stream:
        return str((await Runner.run(agent, task_messages())).final_output)
    result = Runner.run_streamed(agent, task_messages())
    async for _ in result.stream_events():
        pass
    return str(result.final_output)


if __name__ == "__main__":
    api, stream = sys.argv[1] == "chat", "stream" in sys.argv[2:]
    set_tracing_disabled(True)  # traces go to OpenAI, with the key of this session
    set_default_openai_api("chat_completions" if api else "responses")
    answer = asyncio.run(run(stream))
    print(
        json.dumps({"answer": answer, "calls": calls, "version": importlib.metadata.version("openai-agents")})
    )

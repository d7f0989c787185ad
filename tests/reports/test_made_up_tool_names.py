"""A tool name that a policy makes up is an error that it reads; it does not end the episode."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import aiohttp
import pytest

from tests.environments import TASK
from tests.fakes import Stage
from tests.integration.gateway.test_environments import call, finished, opened, service, stage
from tests.integration.gateway.test_mcp import connected
from tidegate.agents.chat import ChatAgent

__all__ = ["service", "stage"]

NAMES = [
    "leave",
    "functions/enter",
    "functions.enter",
    "../finish",
    "..",
    ".",
    "/",
    "//",
    "",
    " ",
    "enter?digit=4#x",
    "100%",
    "%2e%2e",
    "é🍎\n\x00",
    "n" * 65,
    "n" * 100_000,
    "🍎" * 5_000,
]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name[:20]))
async def test_an_agents_call_of_a_name_that_does_not_exist(stage: Stage, name: str) -> None:
    """verl-project/verl#4198, gptscript-ai/gptscript#656, aliasrobotics/cai#405, google/adk-js#789"""
    session = await opened(stage)
    message = await session.call(call(name, digit=4))
    assert message["content"].startswith("there is no tool ")
    assert message["content"].endswith("; the tools are enter, read")
    assert len(message["content"]) < 400
    [recorded] = (await finished(stage, session)).tool_calls
    assert (recorded.error, recorded.known) == (True, False)
    assert recorded.name == name[:256]


@pytest.mark.parametrize("name", ["functions/enter", "../finish", "n" * 65])
async def test_the_chat_agent_plays_on(stage: Stage, name: str) -> None:
    """run-llama/llama_index#7170, SREGym/SREGym#741, RobotecAI/rai#853"""
    session = await opened(stage)
    stage.say(f'<tool_call>\n{{"name": "{name}", "arguments": {{"digit": 4}}}}\n</tool_call>')
    stage.say("4711")
    assert await ChatAgent(max_turns=2).run(TASK.view(), session) == "4711"


@pytest.mark.parametrize("name", ["functions/enter", "n" * 65, "100%"])
async def test_other_clients_get_the_error_too(stage: Stage, name: str) -> None:
    """OpenHands/OpenHands#5111, zed-industries/zed#29946, for HTTP and MCP clients"""
    session = await opened(stage)
    headers = {"Authorization": f"Bearer {session.api_key}"}
    url = f"{session.url}/tools/{quote(name, safe='')}"
    async with aiohttp.ClientSession(headers=headers) as http, http.post(url, json={}) as response:
        answer: Any = await response.json()
        assert response.status == 200
    assert answer["error"]
    async with connected(session) as client:
        result = await client.call_tool(name, {})
    assert result.is_error
    assert result.content[0].text == answer["content"]

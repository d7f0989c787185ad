"""Agent frameworks on the gateway with the embedded engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.support import NODE, PROGRAMS, QUESTION, call, python, run_client, scripted
from tests.clients.test_sdks import solved
from tidegate.gateway.client import GatewayClient
from tidegate.types import Task

pytestmark = pytest.mark.clients
BEGUN = '<tool_call>\n{"name":'
SUM = Task("sum", "", [{"role": "user", "content": QUESTION}])


@pytest.mark.parametrize("way", ["whole", "stream"])
@pytest.mark.parametrize("dialect", ["chat", "responses"])
async def test_openai_agents_sdk(client: GatewayClient, dialect: str, way: str) -> None:
    solved(await run_client(client, [python("frameworks"), str(PROGRAMS / "agents_sdk.py"), dialect, way]))


@pytest.mark.parametrize("way", ["whole", "stream"])
@pytest.mark.parametrize("dialect", ["chat", "responses", "messages"])
async def test_langgraph(client: GatewayClient, dialect: str, way: str) -> None:
    program = str(PROGRAMS / "langgraph_agent.py")
    solved(await run_client(client, [python("frameworks"), program, dialect, way]))


async def test_smolagents(tmp_path: Path) -> None:
    """The replies are scripted, because the prompts are too long for the bundled model."""
    replies = [
        # smolagents requires tool calls, so the prompt ends with the beginning of a call.
        call("calculator", expression="10 * 5 + 6 * 15").removeprefix(BEGUN),
        call("final_answer", answer="#### 140").removeprefix(BEGUN),
    ]
    async with scripted(tmp_path, replies) as stage:
        program = str(PROGRAMS / "smolagents_agent.py")
        episode = await run_client(stage.client, [python("frameworks"), program], task=SUM)
    assert episode.saw["answer"] == "#### 140"
    assert episode.saw["calls"] == [["calculator", {"expression": "10 * 5 + 6 * 15"}]]
    first, second = episode.trajectory.turns
    assert (first.parse, second.parse) == ("ok", "ok")
    # smolagents rewrites the call as text in the next prompt, which is recorded as an edited history.
    assert second.parent is None
    assert second.branch == "edited: message 2 (assistant) is not the recorded reply"


@pytest.mark.parametrize("way", ["whole", "stream"])
@pytest.mark.parametrize("dialect", ["chat", "responses"])
async def test_an_agent_in_javascript(client: GatewayClient, dialect: str, way: str) -> None:
    env = {"NODE_MODULES": str(NODE)}
    solved(await run_client(client, ["node", str(PROGRAMS / "agent.mjs"), dialect, way], env=env))

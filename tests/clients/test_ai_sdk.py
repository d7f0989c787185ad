"""The AI SDK (npm) on the gateway, with its OpenAI, OpenAI-compatible and Anthropic providers."""

from __future__ import annotations

import asyncio

import pytest

from tests.clients.support import NODE, PROGRAMS, Episode, run_client
from tests.clients.test_agent_frameworks import EXPRESSIONS, SAMPLING, SUM, stage
from tests.clients.test_sdks import solved
from tests.fakes import Stage
from tidegate.gateway.client import GatewayClient

__all__ = ["stage"]
pytestmark = pytest.mark.clients
ENV = {"NODE_MODULES": str(NODE)}
COMMAND = [str(NODE / ".bin" / "node"), str(PROGRAMS / "ai_sdk.mjs")]
DIALECTS = pytest.mark.parametrize("dialect", ["chat", "compatible", "responses", "messages"])


@DIALECTS
async def test_ai_sdk(client: GatewayClient, dialect: str) -> None:
    whole = await run_client(client, [*COMMAND, dialect, "whole"], env=ENV)
    streamed = await run_client(client, [*COMMAND, dialect, "stream"], env=ENV)
    solved(whole)
    solved(streamed)
    assert streamed.saw["pieces"] > 1, "the answer came in one piece"


@pytest.mark.asyncio(loop_scope="module")
@DIALECTS
async def test_ai_sdk_with_thoughts_text_and_parallel_calls(stage: Stage, dialect: str) -> None:
    """With Responses, the client refers to thoughts and texts by id and sends the calls in full."""

    async def run(way: str) -> Episode:
        return await run_client(stage.client, [*COMMAND, dialect, way], task=SUM, env=ENV, sampling=SAMPLING)

    for episode in await asyncio.gather(run("whole"), run("stream")):
        assert episode.saw["answer"].endswith("#### 140")
        assert [arguments["expression"] for _, arguments in episode.saw["calls"]] == EXPRESSIONS
        episode.assert_one_line(3)
        added = [episode.trajectory.turns[index].delta_ids.tolist() for index in (1, 2)]
        assert all("<tool_call>" not in stage.gateway.renderer.decode(ids) for ids in added)

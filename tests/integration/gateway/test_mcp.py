"""An episode's tools by the official MCP client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from mcp import ClientSession, MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client

from tests.environments import LocalEnvironments, Safe
from tests.fakes import Stage, staged
from tests.integration.gateway.test_environments import STATELESS, finished, opened
from tests.tiny_tokenizer import make_model_dir
from tidegate.agents.base import Session


@pytest.fixture
def service() -> LocalEnvironments:
    return LocalEnvironments(Safe())


@pytest.fixture
async def stage(tmp_path: Path, service: LocalEnvironments) -> AsyncIterator[Stage]:
    async with staged(make_model_dir(tmp_path / "tiny", "qwen3"), environments=service) as made:
        yield made


@contextlib.asynccontextmanager
async def connected(session: Session, key: str | None = None) -> AsyncIterator[ClientSession]:
    headers = {"Authorization": f"Bearer {key or session.api_key}"}
    async with (
        create_mcp_http_client(headers=headers) as http,
        streamable_http_client(session.mcp_url, http_client=http) as (read, write),
        ClientSession(read, write) as client,
    ):
        await client.initialize()
        yield client


async def test_an_mcp_client_lists_and_calls_the_tools(stage: Stage, service: LocalEnvironments) -> None:
    session = await opened(stage)
    async with connected(session) as client:
        listed = (await client.list_tools()).tools
        described = [(one.name, one.description, one.input_schema["required"]) for one in listed[:1]]
        assert described == [("enter", "Enters a digit.", ["digit"])]
        for digit, text, error in ((4, "closed", False), (11, "11 is not a digit", True)):
            result = await client.call_tool("enter", {"digit": digit})
            assert (result.content[0].text, result.is_error) == (text, error)
        assert (await client.call_tool("leave", {})).is_error
    calls = (await finished(stage, session)).tool_calls
    assert [(one.name, one.arguments, one.error) for one in calls] == [
        ("enter", {"digit": 4}, False), ("enter", {"digit": 11}, True), ("leave", {}, True)
    ]  # fmt: skip


async def test_calls_in_parallel_are_all_recorded(stage: Stage) -> None:
    session = await opened(stage)
    async with connected(session) as client:
        results = await asyncio.gather(*(client.call_tool("enter", {"digit": one}) for one in range(10)))
    assert {result.content[0].text for result in results} == {"closed"}
    calls = (await finished(stage, session)).tool_calls
    assert sorted(one.arguments["digit"] for one in calls) == list(range(10))


async def test_a_lost_state_is_an_error_of_the_protocol(stage: Stage, service: LocalEnvironments) -> None:
    session = await opened(stage)
    async with connected(session) as client:
        await client.call_tool("enter", {"digit": 4})
        service.lose()
        with pytest.raises(MCPError, match="state is lost: its process ended"):
            await client.call_tool("enter", {"digit": 7})


async def test_another_key_opens_nothing(stage: Stage) -> None:
    session, other = await opened(stage), await opened(stage)
    with pytest.raises(BaseExceptionGroup):
        async with connected(session, other.api_key):
            pass


async def test_a_task_without_environment_has_no_tools(stage: Stage) -> None:
    async with connected(await opened(stage, task=STATELESS)) as client:
        assert (await client.list_tools()).tools == []


@pytest.mark.parametrize("method", ["get", "delete"])
async def test_the_server_is_stateless(stage: Stage, method: str) -> None:
    session = await opened(stage)
    assert await status(session, method) == 405


async def test_a_session_that_is_over_answers_410(stage: Stage) -> None:
    session = await opened(stage)
    await finished(stage, session)
    assert await status(session, "post") == 410


async def status(session: Session, method: str) -> int:
    headers = {"Authorization": f"Bearer {session.api_key}", "Accept": "application/json"}
    async with aiohttp.ClientSession() as http:
        body: Any = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
        async with http.request(method, session.mcp_url, headers=headers, json=body) as response:
            return response.status

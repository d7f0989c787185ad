"""The refine service: a second model at its own URLs; calls go to the least loaded one."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from aiohttp import web

from tests.http_app import served_app
from tests.rag_stand import FakeIndex, serving
from tests.scripted_llm import Reply, scripted_llm, tool_call
from tidegate.agents.base import Session
from tidegate.agents.refine import Refiner
from tidegate.agents.search import SearchAgent
from tidegate.errors import InfrastructureError
from tidegate.types import TaskView

TASK = TaskView("t", [{"role": "user", "content": "What is in 7?"}])


async def refine(refiner: Refiner) -> str:
    return await refiner.refine("What?", "7", "[d/7] Title 7\nText 7.")


def says(text: str) -> Any:
    return lambda _: {"content": text}


async def test_the_model_reads_what_was_condensed() -> None:
    replies: list[Reply] = [tool_call("search", {"query": "7"}), {"content": "<answer>7</answer>"}]
    script = iter(replies)
    async with (
        serving(FakeIndex()) as stand,
        scripted_llm(says("[d/7] holds it.")) as (refine_url, refined),
        scripted_llm(lambda _: next(script)) as (url, requests),
    ):
        agent = SearchAgent([stand.url], k=2, refine={"urls": [refine_url], "model": "small"})
        result = await agent.run(TASK, Session(url, "key", "policy", None, time.monotonic() + 30))
        await agent.aclose()
    assert result.metrics["refine_seconds"] > 0
    assert requests[1]["messages"][-1]["content"] == "[d/7] holds it."
    assert refined[0]["model"] == "small"
    for part in ("What is in 7?", "Query: 7", "[d/7] Title 7\nText 7 of a.", "[d/8]"):
        assert part in refined[0]["messages"][0]["content"]


async def test_calls_go_where_the_fewest_are_in_flight() -> None:
    """Each endpoint holds what it gets until all six calls have come."""
    came = asyncio.Barrier(6)
    counts = {"a": 0, "b": 0, "c": 0}

    async def complete(request: web.Request) -> web.Response:
        counts[request.match_info["name"]] += 1
        await came.wait()
        message = {"role": "assistant", "content": "short"}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        reply = {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        return web.json_response(reply)

    app = web.Application()
    app.router.add_post("/{name}/chat/completions", complete)
    async with served_app(app) as url:
        refiner = Refiner([f"{url}/{name}" for name in counts], "m", timeout_s=20)
        assert await asyncio.gather(*(refine(refiner) for _ in range(6))) == ["short"] * 6
    assert counts == {"a": 2, "b": 2, "c": 2}
    assert all(endpoint.calls == 2 and endpoint.in_flight == 0 for endpoint in refiner.endpoints)


async def test_an_endpoint_that_fails_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    async with scripted_llm(says("short")) as (url, requests):
        refiner = Refiner(["http://127.0.0.1:9/v1", url], "m")
        assert [await refine(refiner) for _ in range(3)] == ["short"] * 3
    assert len(requests) == 3
    assert "http://127.0.0.1:9/v1: APIConnectionError" in caplog.text
    assert "1 of its 1 calls failed" in caplog.text
    assert [(endpoint.calls, endpoint.failures) for endpoint in refiner.endpoints] == [(1, 1), (3, 0)]


@pytest.mark.parametrize("reply", [{"content": ""}, {"content": None}])
async def test_a_service_that_says_nothing_is_an_infrastructure_failure(reply: Reply) -> None:
    async with scripted_llm(lambda _: reply) as (url, requests):
        with pytest.raises(InfrastructureError, match=r"refine service failed: .* returned no text"):
            await refine(Refiner([url], "m", attempts=2))
    assert len(requests) == 2


async def test_a_silent_service_is_given_up() -> None:
    end = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await end.wait()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        refiner = Refiner([url], "m", timeout_s=0.2, attempts=1)
        with pytest.raises(InfrastructureError, match=r"took longer than 0\.2 s|APITimeoutError"):
            await refine(refiner)
        end.set()
    endpoint = refiner.endpoints[0]
    assert (endpoint.calls, endpoint.failures, endpoint.in_flight) == (1, 1, 0)


@pytest.mark.parametrize(
    "said", ["<think>\nHm.\n</think>\n\n[d/7] holds it.", "Hm.\n</think>\n[d/7] holds it."]
)
async def test_a_helper_s_reasoning_is_left_out(said: str) -> None:
    async with scripted_llm(says(said)) as (url, _):
        assert await refine(Refiner([url], "m")) == "[d/7] holds it."


async def test_a_helper_whose_reasoning_was_cut_gave_nothing() -> None:
    async with scripted_llm(says("<think>\nHm, let me")) as (url, _):
        with pytest.raises(InfrastructureError, match="max_tokens"):
            await refine(Refiner([url], "m", attempts=1))

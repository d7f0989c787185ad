"""The client of `Session.openai()` behaves as the SDK's own: each test runs both against the same server."""

from __future__ import annotations

import asyncio
import gc
import gzip
import importlib
import importlib.util
import json
import re
from collections.abc import Awaitable
from typing import Any

import openai
import orjson
import pytest
from openai import AsyncOpenAI
from openai.resources.chat.completions import AsyncCompletions
from openai.types.chat import ChatCompletionMessage

from tests.scripted_server import Scripted, scripted
from tests.sdk_clients import (
    ASK,
    CLOSE,
    HANG,
    OK,
    REPLY,
    RESET,
    SSE,
    STREAM,
    STREAM_HEAD,
    TOOL,
    Answers,
    alike,
    chunk,
    clients,
    create,
    error,
    outcome,
    outcomes,
    response,
    streamed,
)
from tests.waiting import eventually
from tidegate.agents import base
from tidegate.agents.base import Session
from tidegate.agents.sdk.client import LeanAsyncOpenAI, new_openai


@pytest.fixture(autouse=True)
def _fast_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsyncOpenAI, "_calculate_retry_timeout", lambda *_, **__: 0.001)


async def test_a_reply() -> None:
    result, requests = await alike(create)
    assert result["choices"][0]["message"]["content"] == "three"
    assert len(requests) == 1


@pytest.mark.parametrize(
    "answers",
    [
        [error(429, "retry-after-ms: 1")],
        [error(500)],
        [error(503), error(429), error(500)],
        [RESET],
        [CLOSE],
        [RESET, error(500), CLOSE],
        [(OK[:-10], RESET)],
        [(OK[:-10], CLOSE)],
        [b"garbage\r\n\r\n"],
        [error(408), error(409)],
    ],
    ids=["429", "500", "statuses", "reset", "close", "mixed", "cut-reset", "cut-close", "garbage", "408-409"],
)
async def test_failures_are_retried(answers: list[Any]) -> None:
    result, requests = await alike(create, *answers)
    assert result["choices"][0]["message"]["content"] == "three"
    assert len(requests) == len(answers) + 1


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (error(400), "BadRequestError"),
        (error(401), "AuthenticationError"),
        (error(404), "NotFoundError"),
        (error(429), "RateLimitError"),
        (error(500), "InternalServerError"),
        (error(500, "x-should-retry: false"), "InternalServerError"),
        (response(200, b"not JSON", "content-type: application/json"), "JSONDecodeError"),
    ],
)
async def test_errors(answer: bytes, kind: str) -> None:
    result, _ = await alike(create, *[answer] * 4)
    assert result[0] == kind


@pytest.mark.parametrize("answer", [RESET, CLOSE, b"garbage\r\n\r\n"])
async def test_connection_errors(answer: Any) -> None:
    found = await outcomes(create, *[answer] * 2, max_retries=1)
    stock = found["stock"]
    assert stock[0][0] == "APIConnectionError"
    for one in found.values():
        assert (one[0][0], one[0][3:], one[1]) == (stock[0][0], stock[0][3:], stock[1])


async def test_a_server_that_does_not_listen() -> None:
    for new in clients().values():
        async with new(base_url="http://127.0.0.1:9/v1", api_key="key", max_retries=1) as llm:
            result = await outcome(create(llm))
            assert (result[0], result[2]) == ("APIConnectionError", "ConnectError")


async def test_a_timeout_is_retried_and_then_raised() -> None:
    result, requests = await alike(create, HANG, HANG, timeout=0.5, max_retries=1)
    assert (result[0], len(requests)) == ("APITimeoutError", 2)


async def test_a_timeout_within_a_reply() -> None:
    result, requests = await alike(create, (OK[:-10], HANG), timeout=0.5, max_retries=1)
    assert (result["choices"][0]["message"]["content"], len(requests)) == ("three", 2)


async def test_a_timeout_is_the_time_between_two_parts() -> None:
    async def slow(connection: Scripted) -> None:
        await connection.request()
        for at in range(0, len(OK), 40):
            await connection.send(OK[at : at + 40])
            await asyncio.sleep(0.04)
        await connection.until_closed()

    assert 0.04 * len(OK) / 40 > 0.25
    async with (
        scripted(slow) as server,
        new_openai(base_url=server.url, api_key="key", timeout=0.25, max_retries=0) as llm,
    ):
        assert (await create(llm))["model"] == "m"


async def test_a_stream() -> None:
    result, _ = await alike(streamed, STREAM)
    assert result == ["th", "ree"]


async def test_a_stream_arrives_as_it_is_sent() -> None:
    more = asyncio.Event()

    async def script(connection: Scripted) -> None:
        await connection.request()
        await connection.send(STREAM_HEAD + chunk(SSE))
        await more.wait()
        await connection.send(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async with scripted(script) as server, new_openai(base_url=server.url, api_key="key") as llm:
        stream = await llm.chat.completions.create(model="m", messages=ASK, stream=True)
        events = [await anext(stream), await anext(stream)]
        assert [event.choices[0].delta.content for event in events] == ["th", "ree"]
        more.set()
        assert [event async for event in stream] == []


@pytest.mark.parametrize("end", [RESET, CLOSE])
async def test_a_stream_that_is_cut(end: str) -> None:
    found = await outcomes(streamed, (STREAM_HEAD + chunk(SSE), end))
    # openai 2 lets the errors of httpx through, and aiohttp does not tell a close from a reset.
    assert {result[0].replace("RemoteProtocol", "Read") for result, _ in found.values()} in (
        {"APIConnectionError"}, {"ReadError"},
    )  # fmt: skip
    assert [len(requests) for _, requests in found.values()] == [1, 1]


async def test_a_refused_stream() -> None:
    result, _ = await alike(streamed, error(400))
    assert result[0] == "BadRequestError"
    assert "as asked" in result[1]


async def test_a_raw_response() -> None:
    async def call(llm: AsyncOpenAI) -> Any:
        raw = await llm.chat.completions.with_raw_response.create(model="m", messages=ASK)
        parsed = raw.parse().model_dump()
        return raw.status_code, raw.headers["x-request-id"], raw.content, raw.retries_taken, parsed

    result, _ = await alike(call, error(500))
    assert result[:4] == (200, "r1", orjson.dumps(REPLY), 1)


async def test_a_streaming_response() -> None:
    async def call(llm: AsyncOpenAI) -> Any:
        completions = llm.chat.completions.with_streaming_response
        async with completions.create(model="m", messages=ASK) as raw:
            return raw.status_code, b"".join([part async for part in raw.iter_bytes()])

    result, _ = await alike(call)
    assert result == (200, orjson.dumps(REPLY))


async def test_the_types_of_raw_responses_are_the_sdks() -> None:
    async with scripted(*[Answers([])] * 2) as server:
        kinds = set()
        for new in (AsyncOpenAI, new_openai):
            async with new(base_url=server.url, api_key="key") as llm:
                raw = await llm.chat.completions.with_raw_response.create(model="m", messages=ASK)
                kinds.add((type(raw.http_response), raw.http_response.http_version))
        assert len(kinds) == 1


async def test_cancelling_closes_the_connection() -> None:
    for new in clients().values():
        script = Answers([HANG])
        async with scripted(script) as server, new(base_url=server.url, api_key="key") as llm:
            call = asyncio.create_task(create(llm))
            await eventually(lambda: script.requests)  # noqa: B023 - awaited here
            call.cancel()
            await server.connections[0].closed.wait()
            assert isinstance((await asyncio.gather(call, return_exceptions=True))[0], asyncio.CancelledError)


async def test_cancelling_a_stream_closes_the_connection() -> None:
    for new in clients().values():
        script, read = Answers([(STREAM_HEAD + chunk(SSE), HANG)]), asyncio.Event()

        async def reads(llm: AsyncOpenAI, read: asyncio.Event) -> None:
            async with await llm.chat.completions.create(model="m", messages=ASK, stream=True) as stream:
                async for _ in stream:
                    read.set()

        async with scripted(script) as server, new(base_url=server.url, api_key="key") as llm:
            call = asyncio.create_task(reads(llm, read))
            await read.wait()
            call.cancel()
            await server.connections[0].closed.wait()
            assert isinstance((await asyncio.gather(call, return_exceptions=True))[0], asyncio.CancelledError)


async def test_a_stream_that_is_left_closes_the_connection() -> None:
    script = Answers([(STREAM_HEAD + chunk(SSE), HANG)])
    async with scripted(script) as server, new_openai(base_url=server.url, api_key="key") as llm:
        async with await llm.chat.completions.create(model="m", messages=ASK, stream=True) as stream:
            await anext(stream)
        await server.connections[0].closed.wait()


async def test_connections_are_kept() -> None:
    async with scripted(*[Answers([])] * 3) as server, new_openai(base_url=server.url, api_key="key") as llm:
        for _ in range(3):
            await create(llm)
        assert len(server.connections) == 1


async def test_no_call_waits_for_the_connection_of_another() -> None:
    """aiohttp's default is 100 connections, httpx's limit here would be 1,000."""
    script = Answers([HANG] * 120)
    async with scripted(*[script] * 120) as server, new_openai(base_url=server.url, api_key="key") as llm:
        calls = [asyncio.create_task(create(llm)) for _ in range(120)]
        await eventually(lambda: len(script.requests) == 120)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


def test_a_loop_that_ends_closes_its_client(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with scripted(Answers([])) as server:
            await create(Session(server.url, "key", "policy", None, float("inf")).openai())
            assert asyncio.get_running_loop() in base._clients

    before = set(base._clients)
    asyncio.run(main())
    gc.collect()
    assert (set(base._clients), caplog.records) == (before, [])


async def test_redirects_and_compressed_replies() -> None:
    packed = gzip.compress(orjson.dumps(REPLY))
    moved = response(307, b"", "location: /elsewhere")
    result, requests = await alike(
        create, moved, response(200, packed, "content-encoding: gzip", "content-type: application/json")
    )
    assert result["model"] == "m"
    assert requests[1].startswith(b"POST /elsewhere")


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"tools": [TOOL], "tool_choice": "auto", "temperature": 0.5, "max_tokens": 3, "seed": None},
        {"messages": [*ASK, {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "content": [{"type": "text", "text": "é🍎\u2028"}], "tool_call_id": "1"}]},
        {"messages": [*ASK, ChatCompletionMessage(role="assistant", content="three"), *ASK]},
        {"messages": tuple(ASK)},
        {"messages": []},
        {"messages": [{"role": "user", "content": openai.NOT_GIVEN}]},
        {"messages": [{"role": "user", "content": ({"type": "text", "text": part} for part in "ab")}]},
        {"messages": ASK, "tools": []},
        {"tools": openai.NOT_GIVEN},
        {"tools": None},
        {"extra_body": {"top_k": 5, "messages": [{"role": "user", "content": "mine"}]}},
        {"extra_headers": {"x-a": "b"}, "extra_query": {"q": "1"}},
        {"messages": [{"role": "user", "content": float("nan")}]},
        {"messages": [{"role": "user", "content": {1: 2}}]},
        {"messages": "not a list"},
        {"messages": None},
        {"response_format": {"type": "json_object"}, "metadata": {"a": "b"}, "user": "u"},
        {"model": 7, "unknown": 1},
    ],
)  # fmt: skip
async def test_requests_are_the_same_to_the_byte(arguments: dict[str, Any]) -> None:
    def call(llm: AsyncOpenAI) -> Awaitable[Any]:
        fresh = dict(arguments)
        if (messages := fresh.get("messages")) and isinstance(messages, list):
            fresh["messages"] = [
                {**one, "content": ({"type": "text", "text": part} for part in "ab")}
                if isinstance(one, dict) and type(one["content"]).__name__ == "generator"
                else one
                for one in messages
            ]
        return create(llm, **fresh)

    await alike(call)


async def test_a_call_without_messages() -> None:
    async def call(llm: Any) -> Any:
        return await llm.chat.completions.create(model="m")

    result, requests = await alike(call)
    assert (result[0], requests) == ("TypeError", [])


async def test_uploads_and_other_methods() -> None:
    async def call(llm: AsyncOpenAI) -> Any:
        await llm.post("/form", cast_to=object, files={"file": ("name", b"data")}, body={"a": "b"})
        response = await llm._client.request("HEAD", "/head", extensions={"trace": traced})
        return response.status_code

    async def traced(name: str, info: Any) -> None: ...

    result, requests = await alike(call, OK, b"HTTP/1.1 204 X\r\n\r\n", default_headers={"x-a": "é"})
    assert result == 204 or result[0] == "UnicodeEncodeError"
    assert len(requests) in (0, 2)


@pytest.mark.parametrize("value", ["a\r\nx-b: 1", "a\nb", "a\x00b"])
async def test_a_header_cannot_contain_another_one(value: str) -> None:
    result, requests = await alike(create, default_headers={"x-a": value}, max_retries=0)
    assert (result[0], requests) == ("APIConnectionError", [])


async def test_a_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Answers([])
    async with scripted(*[script] * 9) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        for new in clients().values():
            async with new(base_url="http://gateway.example/v1", api_key="key", max_retries=0) as llm:
                assert (await create(llm))["model"] == "m"
    assert len(script.requests) == len(clients())
    assert {one.partition(b" HTTP")[0] for one in script.requests} == {
        b"POST http://gateway.example/v1/chat/completions"
    }


async def test_a_host_without_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    result, _ = await alike(create)
    assert result["model"] == "m"


async def test_a_tracing_library_reads_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    original = AsyncCompletions.create

    async def traced(self: AsyncCompletions, **arguments: Any) -> Any:
        seen.append(arguments["messages"])
        return await original(self, **arguments)

    monkeypatch.setattr(AsyncCompletions, "create", traced)
    async with scripted(Answers([])) as server, new_openai(base_url=server.url, api_key="key") as llm:
        await create(llm)
    assert seen == [ASK]


async def test_sessions_share_connections_and_have_their_own_keys() -> None:
    script = Answers([])
    async with scripted(script) as server:
        for name in ("one", "two"):
            session = Session(f"{server.url}/s/{name}/v1", name, "policy", None, float("inf"))
            llm = session.openai(train=name == "one")
            assert isinstance(llm, LeanAsyncOpenAI)
            await create(llm)
        assert len(server.connections) == 1
        await llm.close()
    keys = [re.findall(rb"authorization: (.*)\r\n", one, re.IGNORECASE)[0] for one in script.requests]
    assert keys == [b"Bearer one", b"Bearer two"]
    assert [b"x-tidegate-train: no" in one for one in script.requests] == [False, True]


async def test_plain_messages_are_not_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    """This is what saves the time."""
    module = importlib.import_module("openai.resources.chat.completions.completions")
    converted: list[Any] = []
    convert = module.async_maybe_transform

    async def noted(data: Any, kind: Any) -> Any:
        converted.append(dict(data))
        return await convert(data, kind)

    monkeypatch.setattr(module, "async_maybe_transform", noted)
    script = Answers([])
    async with scripted(script) as server, new_openai(base_url=server.url, api_key="key") as llm:
        await create(llm, tools=[TOOL])
    assert [(one["messages"], one["tools"]) for one in converted] == [((), ())]
    body = json.loads(script.requests[0].partition(b"\r\n\r\n")[2])
    assert (body["messages"], body["tools"]) == (ASK, [TOOL])

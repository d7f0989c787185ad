"""Retried and undelivered replies, with the raw HTTP that an SDK sends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from tests.fakes import Fault, Stage, eventually
from tests.http_app import served_app
from tests.integration.gateway.chat_calls import ASK
from tests.integration.gateway.sdk_stage import finished, opened, stage
from tidegate.gateway.client import SessionAccess
from tidegate.gateway.sessions.model_calls import ModelCall, TurnRequest, digest_of

__all__ = ["stage"]


async def post(
    access: SessionAccess, http: aiohttp.ClientSession, body: dict[str, Any], **headers: str
) -> tuple[int, dict[str, Any]]:
    told = {"Authorization": f"Bearer {access.api_key}", **headers}
    url = f"{access.base_url}/chat/completions"
    async with http.post(url, data=orjson.dumps(body), headers=told) as response:
        return response.status, orjson.loads(await response.read())


async def test_an_idempotency_key_gets_the_same_turn_again(stage: Stage) -> None:
    access, _ = await opened(stage)
    body = {"model": "m", "messages": ASK}
    async with aiohttp.ClientSession() as http:
        key = {"Idempotency-Key": "k1"}
        first, again = await post(access, http, body, **key), await post(access, http, body, **key)
        other = await post(access, http, {**body, "messages": ASK[1:]}, **key)
    assert first == again
    assert (other[0], "another body" in other[1]["error"]["message"]) == (400, True)
    assert len(stage.engine.requests) == 1


@pytest.mark.parametrize("count", ["1", "9" * 5000])
async def test_a_retry_joins_the_call_that_is_under_way(stage: Stage, count: str) -> None:
    access, _ = await opened(stage)
    body = {"model": "m", "messages": ASK}
    stage.engine.faults.append(Fault("hold"))
    async with aiohttp.ClientSession() as http:
        first = asyncio.create_task(post(access, http, body))
        await stage.engine.until(lambda: len(stage.engine.requests) == 1)
        retry = asyncio.create_task(post(access, http, body, **{"x-stainless-retry-count": count}))
        await eventually(lambda: stage.gateway.metrics.retries_joined)
        stage.engine.release()
        assert await first == await retry
    assert len(stage.engine.requests) == 1


@contextlib.asynccontextmanager
async def losing(url: str) -> AsyncIterator[str]:
    """A proxy that loses the first reply after all of it arrived: the gateway cannot know."""
    lost = False

    async def forward(request: web.Request) -> web.Response:
        nonlocal lost
        headers = {name: request.headers[name] for name in request.headers if name.lower() != "host"}
        body = await request.read()
        async with http.post(url + request.path, data=body, headers=headers) as response:
            reply = await response.read()
        if not lost:
            lost = True
            assert request.transport is not None
            request.transport.abort()
        return web.Response(body=reply, status=response.status, content_type=response.content_type)

    app = web.Application()
    app.router.add_post("/{path:.*}", forward)
    async with served_app(app) as proxy, aiohttp.ClientSession() as http:
        yield proxy


async def by_chat(llm: AsyncOpenAI, claude: AsyncAnthropic) -> str | None:
    return (await llm.chat.completions.create(model="m", messages=ASK)).choices[0].message.content


async def by_streamed_chat(llm: AsyncOpenAI, claude: AsyncAnthropic) -> str:
    stream = await llm.chat.completions.create(model="m", messages=ASK, stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def by_completions(llm: AsyncOpenAI, claude: AsyncAnthropic) -> str:
    return (await llm.completions.create(model="m", prompt="1+2?")).choices[0].text


async def by_responses(llm: AsyncOpenAI, claude: AsyncAnthropic) -> str:
    return (await llm.responses.create(model="m", input="1+2?")).output_text


async def by_messages(llm: AsyncOpenAI, claude: AsyncAnthropic) -> str:
    asked: Any = [{"role": "user", "content": "1+2?"}]
    reply = await claude.messages.create(model="m", max_tokens=50, messages=asked)
    return "".join(block.text for block in reply.content if block.type == "text")


@pytest.mark.parametrize("ask", [by_chat, by_streamed_chat, by_completions, by_responses, by_messages])
async def test_a_retry_after_a_lost_reply_gets_that_reply(stage: Stage, ask: Callable[..., Any]) -> None:
    access, _ = await opened(stage)
    stage.say("it is 3")
    stage.say("another sample")
    async with losing(stage.url) as url:
        path = access.base_url.removeprefix(stage.url)
        llm = AsyncOpenAI(base_url=url + path, api_key=access.api_key, max_retries=1)
        claude = AsyncAnthropic(
            base_url=url + path.removesuffix("/v1"), api_key=access.api_key, max_retries=1
        )
        async with llm, claude:
            assert await ask(llm, claude) == "it is 3"
    assert len(stage.engine.requests) == 1
    trajectory = await finished(stage, access)
    assert [turn.delivered for turn in trajectory.turns] == [True]


async def test_a_retry_of_a_quoted_turn_is_a_sample_of_its_own(stage: Stage) -> None:
    """The reply arrived, so another call of the same body is what is retried."""
    access, _ = await opened(stage)
    body = {"model": "m", "messages": ASK}
    async with aiohttp.ClientSession() as http:
        _, first = await post(access, http, body)
        await post(access, http, {**body, "messages": [*ASK, first["choices"][0]["message"], ASK[1]]})
        _, again = await post(access, http, body, **{"x-stainless-retry-count": "1"})
    assert again["id"] != first["id"]
    assert len(stage.engine.requests) == 3


async def test_a_retry_with_a_new_key_is_a_sample_of_its_own(stage: Stage) -> None:
    """Its first attempt never came: a reply to another key is not for it."""
    access, _ = await opened(stage)
    body = {"model": "m", "messages": ASK}
    async with aiohttp.ClientSession() as http:
        await post(access, http, body, **{"Idempotency-Key": "k1"})
        await post(access, http, body, **{"Idempotency-Key": "k2", "x-stainless-retry-count": "1"})
    assert len(stage.engine.requests) == 2


async def test_a_retry_of_an_abandoned_call_does_not_share_its_twins_sample(stage: Stage) -> None:
    """Two identical calls run; one client leaves and retries: the other one's reply is not for it."""
    access, _ = await opened(stage)
    body = {"model": "m", "messages": ASK}
    stage.engine.faults.extend([Fault("hold"), Fault("hang")])
    async with aiohttp.ClientSession() as http:
        twin = asyncio.create_task(post(access, http, body))
        await stage.engine.until(lambda: len(stage.engine.requests) == 1)
        left = asyncio.create_task(post(access, http, body))
        await stage.engine.until(lambda: len(stage.engine.requests) == 2)
        left.cancel()
        await stage.engine.until(lambda: bool(stage.engine.aborted))
        retried = await post(access, http, body, **{"x-stainless-retry-count": "1"})
        stage.engine.release()
        assert (await twin)[1]["id"] != retried[1]["id"]
    assert len(stage.engine.requests) == 3


async def test_a_key_does_not_join_a_call_that_was_abandoned_a_moment_ago(stage: Stage) -> None:
    """Before its task has heard that it is cancelled, there is nothing to wait for any more."""
    access, _ = await opened(stage)
    stage.engine.faults.append(Fault("hang"))
    async with aiohttp.ClientSession() as http:
        left = asyncio.create_task(
            post(access, http, {"model": "m", "messages": ASK}, **{"Idempotency-Key": "k"})
        )
        await stage.engine.until(lambda: len(stage.engine.requests) == 1)
        session = stage.gateway.sessions.get(access.session_id)
        assert session is not None
        (call,) = session.calls.running
        before = session.calls.find_repeated(call.request)
        listeners, call.listeners = call.listeners, set()
        stage.gateway.turns.on_disconnect(session, call)
        after = session.calls.find_repeated(call.request)
        call.listeners = listeners
        assert (await left)[0] == 424
    assert before is call
    assert after is None


async def test_identical_requests_are_separate_samples(stage: Stage) -> None:
    access, llm = await opened(stage, seed=1)
    for _ in range(2):
        await llm.chat.completions.create(model="m", messages=ASK)
    first, second = stage.engine.requests
    assert first["sampling_params"]["sampling_seed"] != second["sampling_params"]["sampling_seed"]
    summary = await stage.client.finish(access.session_id, reward=0)
    assert summary.turns == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_aborts_its_generation(stage: Stage, stream: bool) -> None:
    access, llm = await opened(stage)
    stage.engine.faults.append(Fault("hang"))
    call = asyncio.create_task(llm.chat.completions.create(model="m", messages=ASK, stream=stream))
    await stage.engine.until(lambda: len(stage.engine.requests) == 1)
    call.cancel()
    await stage.engine.until(lambda: stage.engine.aborted == [stage.engine.requests[0]["rid"]])
    stage.say("again")
    retried = await llm.with_options(
        default_headers={"x-stainless-retry-count": "1"}
    ).chat.completions.create(model="m", messages=ASK)
    assert retried.choices[0].message.content == "again"
    assert (await stage.client.finish(access.session_id, reward=0)).turns == 1


async def made(call: ModelCall) -> None:
    """Until a call that nobody listens to is over."""
    assert call.task is not None
    await call.task


async def test_a_turn_that_was_not_delivered_is_recorded_as_such_and_given_to_the_retry(
    stage: Stage,
) -> None:
    """Two wait for one call; the reply comes while neither takes it."""
    access, _ = await opened(stage)
    session = stage.gateway.session(access.session_id)
    stage.say("lost")
    body = orjson.dumps({"model": "m", "messages": ASK})
    ask = TurnRequest(ASK, digest=digest_of(b"tidegate.gateway.dialects.chat/0/", body))
    await made(stage.gateway.turns.call(session, ask))
    assert [node.turn.delivered for node in session.tree.nodes] == [False]
    assert (await stage.client.list_groups()) == []
    async with aiohttp.ClientSession() as http:
        status, reply = await post(access, http, orjson.loads(body), **{"x-stainless-retry-count": "1"})
    assert (status, reply["choices"][0]["message"]["content"]) == (200, "lost")
    assert len(stage.engine.requests) == 1
    await stage.client.finish(access.session_id, reward=0)
    assert [t.delivered for t in (await stage.client.trajectory(access.session_id)).turns] == [True]


async def test_a_quoted_reply_was_delivered(stage: Stage) -> None:
    access, llm = await opened(stage)
    session = stage.gateway.session(access.session_id)
    stage.say("lost, it seemed")
    await made(stage.gateway.turns.call(session, TurnRequest(ASK)))
    history = [*ASK, {"role": "assistant", "content": "lost, it seemed"}, ASK[1]]
    await llm.chat.completions.create(model="m", messages=history)
    assert [node.turn.delivered for node in session.tree.nodes] == [True, True]
    assert stage.gateway.metrics.undelivered_turns == 0

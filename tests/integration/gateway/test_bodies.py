"""Request bodies: the key is checked first, size and time are limited, large ones do not block others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson
import pytest
from starlette.types import ASGIApp

from tests.fakes import Stage, eventually
from tests.integration.gateway.sdk_stage import TASK, finished, opened, stage
from tidegate.gateway.http.app import create_app
from tidegate.gateway.sharding.router import ShardRouter
from tidegate.gateway.turns import request_reader
from tidegate.types import Outcome

__all__ = ["stage"]

TOO_LONG = "tidegate " * 100_000  # of 900 kB: no tokenizer makes 4096 tokens of it


class Asked:
    """A request to the app, whose body is counted as it is read."""

    def __init__(self, app: ASGIApp, path: str, headers: dict[str, str], chunks: int) -> None:
        self.app = app
        self.scope: dict[str, Any] = {
            "type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": path,
            "raw_path": path.encode(), "query_string": b"", "root_path": "", "server": ("127.0.0.1", 1),
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }  # fmt: skip
        self.read, self._chunks = 0, chunks
        self.status = 0

    async def _receive(self) -> dict[str, Any]:
        self.read += 1
        return {"type": "http.request", "body": b" " * 2**20, "more_body": self.read < self._chunks}

    async def _send(self, message: Any) -> None:
        self.status = message.get("status", self.status)

    async def run(self) -> tuple[int, int]:
        """The status, and how many megabytes were read."""
        await self.app(self.scope, self._receive, self._send)
        return self.status, self.read


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/groups/a/v1/b/seal", 401),
        ("/sessions", 401),
        ("/groups/lease", 401),
        ("/no/such/route", 401),
        ("/v1/chat/completions", 401),
        ("/v1/no/such/route", 404),
        ("/s/x/v1/messages/count_tokens", 401),
    ],
)
async def test_without_a_key_no_body_is_read(stage: Stage, path: str, status: int) -> None:
    assert await Asked(create_app(stage.gateway), path, {}, 600).run() == (status, 0)


@pytest.mark.parametrize("path", ["/groups/a/v1/b/seal", "/sessions", "/groups/lease", "/engines"])
async def test_without_a_key_the_router_reads_no_body(path: str) -> None:
    router = ShardRouter([], "admin", pytest.fail).create_app()
    assert await Asked(router, path, {}, 600).run() == (401, 0)
    wrong = {"authorization": "Bearer admin2"}
    assert await Asked(router, path, wrong, 600).run() == (401, 0)


@pytest.mark.parametrize(
    ("path", "megabytes"),
    [("/groups/a/v1/b/seal", 65), ("/sessions", 65), ("/groups/lease", 65), ("/health", 2)],
)
async def test_with_the_key_bodies_are_bounded(stage: Stage, path: str, megabytes: int) -> None:
    asked = Asked(create_app(stage.gateway), path, {"authorization": "Bearer admin"}, 600)
    assert await asked.run() == (413, megabytes)


async def test_calls_of_tools_are_bounded(stage: Stage) -> None:
    access, _ = await opened(stage)
    headers = {"authorization": f"Bearer {access.api_key}", "content-type": "application/json"}
    app = create_app(stage.gateway)
    for path in ("tools/a", "mcp"):
        asked = Asked(app, f"/s/{access.session_id}/{path}", headers, 600)
        assert await asked.run() == (413, 2), path


async def test_without_a_key_health_takes_no_large_body(stage: Stage) -> None:
    assert await Asked(create_app(stage.gateway), "/health", {}, 600).run() == (413, 2)


async def test_the_bytes_of_one_session_are_bounded_and_no_other_one_notices(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_reader, "HELD_BODIES", 3 * 2**20)
    access, llm = await opened(stage)
    app = create_app(stage.gateway)
    headers = {"authorization": f"Bearer {access.api_key}"}
    for path in ("v1/chat/completions", "v1/messages/count_tokens", "respond"):
        assert await Asked(app, f"/s/{access.session_id}/{path}", headers, 600).run() == (429, 4), path
    assert await llm.chat.completions.create(model="m", messages=TASK.messages)
    assert not stage.gateway.bodies._held, "all were counted off again"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/groups/a/v1/b/seal", "/groups/lease"])
async def test_a_body_that_does_not_come_is_not_waited_for(
    stage: Stage, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_reader, "BODY_S", 0.2)
    access, _ = await opened(stage)
    key = access.api_key if path.startswith("/v1") else "admin"
    reader, writer = await asyncio.open_connection("127.0.0.1", int(stage.url.rpartition(":")[2]))
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: 100\r\n\r\n[1,"
    writer.write(head.encode())
    async with asyncio.timeout(20):
        answer = await reader.readuntil(b"}}")
    writer.close()
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"did not arrive within 0.2 s" in answer
    assert b"x-should-retry" not in answer


# -- large ones


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as made:
        yield made


DIALECTS: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": TOO_LONG}]},
    "responses": {"input": TOO_LONG},
    "messages": {"max_tokens": 5, "messages": [{"role": "user", "content": TOO_LONG}]},
    "messages/count_tokens": {"messages": [{"role": "user", "content": TOO_LONG}]},
    "completions": {"prompt": TOO_LONG},
}


@pytest.mark.parametrize("path", sorted(DIALECTS))
async def test_what_cannot_fit_is_refused_without_being_encoded(
    stage: Stage, http: aiohttp.ClientSession, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    access, _ = await opened(stage)
    encoded: list[int] = []
    backend = stage.gateway.renderer.codec._encode
    monkeypatch.setattr(
        stage.gateway.renderer.codec, "_encode", lambda text: encoded.append(len(text)) or backend(text)
    )
    headers = {"Authorization": f"Bearer {access.api_key}"}
    body = orjson.dumps({"model": "m", **DIALECTS[path]})
    async with http.post(f"{access.base_url}/{path}", data=body, headers=headers) as response:
        told = await response.text()
    assert response.status == 400, told
    assert "the prompt alone has at least" in told
    assert "context_length_exceeded" in told
    assert max(encoded, default=0) < 10_000
    assert stage.gateway.session(access.session_id).context_overflow is None


async def with_context(stage: Stage, tokens: int) -> None:
    stage.engine.max_context = tokens
    await eventually(lambda: stage.gateway.pool.max_context() == tokens)


async def test_a_history_that_outgrew_the_context_truncates_its_session(stage: Stage) -> None:
    access, llm = await opened(stage)
    stage.say("a reply")
    ask: list[Any] = [{"role": "user", "content": "1+2?"}]
    reply = await llm.chat.completions.create(model="m", messages=ask)
    history = [*ask, reply.choices[0].message.model_dump(exclude_none=True)]
    with pytest.raises(Exception, match="at least"):
        await llm.chat.completions.create(
            model="m", messages=[*history, {"role": "user", "content": TOO_LONG}]
        )
    summary = await stage.client.finish(access.session_id, outcome=Outcome.AGENT_ERROR, reward=1)
    assert summary.outcome is Outcome.TRUNCATED


async def test_a_large_body_is_recorded_as_a_small_one_would_be(stage: Stage) -> None:
    """What is large besides the prompt, and a prompt that must be encoded in a thread."""
    await with_context(stage, 100_000)
    access, llm = await opened(stage)
    text = "one two three\n" * 320  # more than is encoded on the loop
    ask: list[Any] = [{"role": "user", "content": text}]
    for reply in ("first", "second", "third"):
        stage.say(reply)
    first = await llm.chat.completions.create(model="m", messages=ask, user="u" * 400_000)
    history = [*ask, first.choices[0].message.model_dump(exclude_none=True), *ask]
    await llm.chat.completions.create(model="m", messages=history, user="u" * 400_000)
    await llm.chat.completions.create(model="m", messages=history)
    record = await finished(stage, access)
    assert [turn.parent for turn in record.turns] == [None, 0, 0]
    renderer = stage.gateway.renderer
    assert record.turns[0].delta_ids.tolist() == renderer.encode(renderer.render_text(ask, None, {}))
    assert record.turns[1].delta_ids.tolist() == record.turns[2].delta_ids.tolist()


async def test_one_session_prepares_one_large_request_at_a_time_and_others_go_on(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one's text is held in its thread; the session's next waits for it, another session's not."""
    import threading

    going, hold = threading.Event(), threading.Event()
    codec = stage.gateway.renderer.codec
    encode = codec._encode

    def held(text: str) -> list[int]:
        if "hold me" in text:
            going.set()
            assert hold.wait(20)
        return encode(text)

    monkeypatch.setattr(codec, "_encode", held)
    await with_context(stage, 100_000)
    (access, llm), (_, other) = await opened(stage), await opened(stage)
    long: list[Any] = [{"role": "user", "content": "hold me " * 1000}]
    first = asyncio.create_task(llm.chat.completions.create(model="m", messages=long))
    try:
        assert await asyncio.to_thread(going.wait, 20)
        second = asyncio.create_task(llm.chat.completions.create(model="m", messages=TASK.messages))
        for _ in range(3):
            await other.chat.completions.create(model="m", messages=TASK.messages)
        assert not first.done()
        assert not second.done()
    finally:
        hold.set()
    await asyncio.gather(first, second, return_exceptions=True)
    assert [turn.parent for turn in (await finished(stage, access)).turns] == [None, None]

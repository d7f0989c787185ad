"""Headers without end and clients that half-close, at the level of a socket, against a whole gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tests.fakes import Fault, Stage, eventually, staged
from tests.integration.gateway.control_stage import TASK
from tests.tiny_tokenizer import make_model_dir
from tidegate.service import bounds
from tidegate.service.bounds import MAX_HEADERS

HEALTH = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async with staged(make_model_dir(tmp_path / "tiny"), admin_key="admin") as made:
        yield made


async def connect(stage: Stage) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = stage.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def exchange(stage: Stage, *parts: bytes, half_close: bool = False) -> bytes:
    """Everything that the server sends until it closes the connection."""
    reader, writer = await connect(stage)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        if half_close:
            writer.write_eof()
        async with asyncio.timeout(20):
            return await reader.read()
    except ConnectionError:  # it closed the connection as more was sent
        return await reader.read()
    finally:
        writer.close()


async def model_call(stage: Stage, headers: bytes = b"") -> bytes:
    access = await stage.client.open_session(task=TASK)
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "1+2?"}]}).encode()
    head = (
        f"POST /s/{access.session_id}/v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Authorization: Bearer {access.api_key}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n"
    )
    return head.encode() + headers + b"\r\n" + body


@pytest.mark.parametrize(
    "parts",
    [
        [HEALTH, *(b"x-%d: y\r\n" % number for number in range(MAX_HEADERS + 1))],
        [HEALTH + b"x: " + b"y" * 2 * bounds.MAX_HEAD],
        [HEALTH, *[b"x" * 8192] * 20],
        [HEALTH + b"".join(b"x-%d: %b\r\n" % (number, b"y" * 900) for number in range(100)), b"\r\n"],
        [b"GET /" + b"x" * 2 * bounds.MAX_HEAD],
        [
            HEALTH.replace(b"GET", b"POST") + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n",
            *(b"x-%d: y\r\n" % number for number in range(MAX_HEADERS + 1)),
        ],
    ],
    ids=["number", "a value", "a name", "bytes", "path", "trailers"],
)
async def test_headers_are_bounded(stage: Stage, parts: list[bytes]) -> None:
    """Kludex/uvicorn#157, Kludex/uvicorn#1684, python-hyper/h11#155, vllm-project/vllm#23267"""
    reply = await exchange(stage, *parts)
    assert b"431 Request Header Fields Too Large" in reply or b"401 Unauthorized" in reply, reply[:200]
    assert (b"431" in reply) or b"chunked" in parts[0]
    async with aiohttp.ClientSession() as http, http.get(f"{stage.url}/health") as health:
        assert health.status == 200


async def test_one_connection_cannot_grow_the_server(stage: Stage) -> None:
    """vllm-project/vllm#23267"""
    _, writer = await connect(stage)
    sent = 0
    try:
        async with asyncio.timeout(20):
            while sent < 100_000_000:
                writer.write(b"x" * 65_536)
                await writer.drain()
                sent += 65_536
    except ConnectionError:
        pass
    finally:
        writer.close()
    assert sent < 20_000_000, "what the sockets hold"


@pytest.mark.parametrize("begin", [b"", b"GET /hea", HEALTH], ids=["nothing", "line", "headers"])
async def test_headers_must_arrive_in_time(
    stage: Stage, begin: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kludex/uvicorn#157"""
    monkeypatch.setattr(bounds, "HEAD_S", 0.3)
    reply = await exchange(stage, begin)
    assert reply.startswith(b"HTTP/1.1 408 ") if begin else reply == b""


async def test_a_connection_in_use_has_no_such_time(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "HEAD_S", 0.2)
    reader, writer = await connect(stage)
    loop = asyncio.get_running_loop()
    began = loop.time()
    while loop.time() < began + 1.0:
        writer.write(HEALTH + b"\r\n")
        async with asyncio.timeout(5):
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r")[0]))
        assert head.startswith(b"HTTP/1.1 200 OK")
        await asyncio.sleep(0.3)
    writer.close()


@pytest.mark.parametrize("more", [b"", b"Connection: close\r\n"], ids=["kept", "closed"])
async def test_a_client_that_half_closes_gets_its_reply(stage: Stage, more: bytes) -> None:
    """Kludex/uvicorn#1264, aio-libs/aiohttp#3659"""
    assert b"HTTP/1.1 200 OK" in await exchange(stage, HEALTH + more + b"\r\n", half_close=True)
    reply = await exchange(stage, await model_call(stage, more), half_close=True)
    assert b"HTTP/1.1 200 OK" in reply
    assert b'"choices"' in reply


async def test_a_client_that_half_closes_gets_a_slow_reply(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kludex/uvicorn#1264"""
    monkeypatch.setattr(bounds, "GONE_S", 0.05)
    stage.engine.faults.append(Fault("hold"))
    waiting = asyncio.create_task(exchange(stage, await model_call(stage), half_close=True))
    await asyncio.sleep(0.5)
    assert not waiting.done()
    stage.engine.release()
    assert b"HTTP/1.1 200 OK" in await waiting


async def test_a_client_that_has_left_is_noticed(stage: Stage) -> None:
    """Kludex/uvicorn#1264: the other side of the same event"""
    _, writer = await connect(stage)
    stage.engine.faults.append(Fault("hold"))
    writer.write(await model_call(stage))
    await writer.drain()
    [session] = stage.gateway.sessions.all()
    await eventually(lambda: bool(session.calls.running))
    writer.close()
    await eventually(lambda: not session.calls.running)
    assert not session.tree.nodes

"""The engines' HTTP client: streams in any pieces, connections kept, failures that are the gateway's own."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import numpy as np
import orjson
import pytest

from tests.scripted_server import Script, Scripted, scripted
from tests.waiting import eventually
from tidegate.errors import EngineError
from tidegate.gateway.engines import client as engines_client
from tidegate.gateway.engines.client import EngineClient
from tidegate.gateway.engines.engine import Affinity, EngineRecord, PoolOptions
from tidegate.gateway.engines.pool import EnginePool
from tidegate.gateway.engines.protocol import GenerateRequest, GenerateResult
from tidegate.service.http1.client import Http1Client
from tidegate.service.http1.errors import ConnectFailed, ConnectionLost

CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def event(ids: list[int], *, last: bool = False) -> bytes:
    meta: dict[str, Any] = {"output_token_logprobs": [[-0.5, one, None] for one in ids]}
    meta["finish_reason"] = {"type": "stop"} if last else None
    return b"data: " + orjson.dumps({"output_ids": ids, "meta_info": meta}) + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


END = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def streaming(*pieces: bytes) -> Script:
    """Answers every request with these pieces, one after another."""

    async def script(connection: Scripted) -> None:
        while True:
            await connection.request()
            for piece in pieces:
                await connection.send(piece)
                await asyncio.sleep(0)

    return script


async def streamed(client: EngineClient, url: str) -> list[GenerateResult]:
    taken: list[GenerateResult] = []
    await client.generate(url, b"{}", True, taken.append)
    return taken


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
async def test_a_stream_in_any_pieces(size: int) -> None:
    data = CHUNKED + chunk(event([5])) + chunk(event([5, 6])) + chunk(event([5, 6, 7], last=True)) + END
    client = EngineClient(connect_s=5.0, probe_timeout_s=5.0)
    async with scripted(streaming(*(data[at : at + size] for at in range(0, len(data), size)))) as server:
        for _ in range(2):
            taken = await streamed(client, server.url)
            assert (taken[-1].ids, taken[-1].finish) == ([5, 6, 7], "stop")
            assert [result.ids for result in taken] == [[5, 6, 7][: len(one.ids)] for one in taken]
            await eventually(lambda: client._http._idle)  # the end of the stream arrives after the last event
        assert len(server.connections) == 1
    await client.close()


async def test_each_event_is_taken_as_it_arrives() -> None:
    more = asyncio.Event()

    async def script(connection: Scripted) -> None:
        await connection.request()
        await connection.send(CHUNKED + chunk(event([5])))
        await more.wait()
        await connection.send(chunk(event([5, 6], last=True)) + END)

    client = EngineClient(connect_s=5.0, probe_timeout_s=5.0)
    async with scripted(script) as server:
        taken: list[GenerateResult] = []
        call = asyncio.create_task(client.generate(server.url, b"{}", True, taken.append))
        await eventually(lambda: taken)
        assert (taken[0].ids, call.done()) == ([5], False)
        more.set()
        await call
        assert taken[-1].ids == [5, 6]
    await client.close()


async def test_a_stream_that_ends_without_its_last_event() -> None:
    client = EngineClient(connect_s=5.0, probe_timeout_s=5.0)
    async with scripted(streaming(CHUNKED + chunk(event([5])) + END)) as server:
        with pytest.raises(ConnectionLost, match="before the finish event"):
            await streamed(client, server.url)
    await client.close()


async def test_an_event_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines_client, "MAX_EVENT", 100)

    async def script(connection: Scripted) -> None:
        await connection.request()
        await connection.send(CHUNKED + chunk(b"data: " + b"x" * 200))
        await connection.until_closed()

    client = EngineClient(connect_s=5.0, probe_timeout_s=5.0)
    async with scripted(script) as server:
        with pytest.raises(EngineError, match="an event of more than 100 bytes"):
            await streamed(client, server.url)
        await server.connections[0].closed.wait()
    await client.close()


async def test_a_redirect_is_named() -> None:
    async def script(connection: Scripted) -> None:
        await connection.request()
        await connection.send(b"HTTP/1.1 307 X\r\nlocation: http://elsewhere/\r\ncontent-length: 0\r\n\r\n")

    client = EngineClient(connect_s=5.0, probe_timeout_s=5.0)
    async with scripted(script) as server:
        with pytest.raises(EngineError, match="redirects to http://elsewhere/; give this address"):
            await streamed(client, server.url)
    await client.close()


async def test_an_invalid_address_is_an_engine_that_does_not_answer() -> None:
    client = EngineClient(connect_s=5.0, probe_timeout_s=5.0)
    assert await client.info("http://h:99999") is None
    client.abort(("http://h:99999",), "r")
    await client.close()


async def serving(connection: Scripted) -> None:
    """An engine: answers probes and calls."""
    while True:
        request = await connection.request()
        if request.startswith(b"GET"):
            await connection.reply(b'{"weight_version": "0"}')
        else:
            await connection.reply(event([5], last=True)[6:-2])


async def test_too_many_open_files_of_the_gateway_quarantine_no_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = EnginePool(PoolOptions(probe_every_s=60.0))
    connect = Http1Client._connect
    failures = 3

    async def failing(self: Http1Client, *arguments: Any) -> Any:
        nonlocal failures
        if failures:
            failures -= 1
            error = ConnectFailed("cannot connect: too many open files")
            error.errno = errno.EMFILE
            raise error
        return await connect(self, *arguments)

    async with scripted(*[serving] * 10) as server:
        engine = await pool.add(EngineRecord(server.url), wait_s=5)
        assert engine.serves
        monkeypatch.setattr(Http1Client, "_take", lambda *_: None)  # every call needs a new connection
        monkeypatch.setattr(Http1Client, "_connect", failing)
        request = GenerateRequest(np.arange(3, dtype=np.int32), {}, 5)
        deadline = asyncio.get_running_loop().time() + 20
        result = await pool.sample(request, Affinity("1", "x"), deadline)
        assert (result.ids, failures, pool.errors) == ([5], 0, 3)
        assert (engine.quarantined, engine.failures) == (False, 0)
        await pool.close()

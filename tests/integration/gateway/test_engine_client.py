"""The engines' HTTP client: streams in any pieces, connections kept, limits, and failures."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from collections.abc import Callable
from typing import Any

import aiohttp
import numpy as np
import orjson
import pytest
import uvloop

from tests.scripted_server import Script, Scripted, scripted
from tests.waiting import eventually
from tidegate.errors import EngineError
from tidegate.gateway.engines import client as engines_client
from tidegate.gateway.engines.client import EngineClient
from tidegate.gateway.engines.engine import Affinity, EngineRecord, PoolOptions
from tidegate.gateway.engines.pool import EnginePool
from tidegate.gateway.engines.protocol import GenerateRequest, GenerateResult

OK = b"HTTP/1.1 200 OK\r\n"
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


def idle(client: EngineClient) -> int:
    """Counts the connections that are kept open."""
    assert client.http.connector is not None
    kept = client.http.connector._conns.values()
    return sum(protocol.is_connected() for connections in kept for protocol, _ in connections)


async def whole(client: EngineClient, url: str) -> list[int]:
    taken: list[GenerateResult] = []
    await client.generate(url, b"{}", False, taken.append)
    return taken[0].ids


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
            await eventually(lambda: idle(client))  # the end of the stream arrives after the last event
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
        with pytest.raises(ConnectionError, match="before the finish event"):
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


REPLY = event([5], last=True)[6:-2]


def answer(body: bytes, headers: bytes = b"") -> bytes:
    return OK + headers + b"content-length: %d\r\n\r\n%b" % (len(body), body)


async def serving_once(connection: Scripted) -> None:
    """An engine: answers a probe or a call, and closes the connection."""
    request = await connection.request()
    body = b'{"weight_version": "0"}' if request.startswith(b"GET") else REPLY
    await connection.reply(body, b"connection: close\r\n")


async def test_too_many_open_files_of_the_gateway_quarantine_no_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = EnginePool(PoolOptions(probe_every_s=60.0))
    connect = aiohttp.connector.aiohappyeyeballs.start_connection
    failures = 3

    async def failing(*arguments: Any, **options: Any) -> Any:
        nonlocal failures
        if failures:
            failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return await connect(*arguments, **options)

    async with scripted(*[serving_once] * 10) as server:
        engine = await pool.add(EngineRecord(server.url), wait_s=5)
        assert engine.serves
        monkeypatch.setattr(aiohttp.connector.aiohappyeyeballs, "start_connection", failing)
        request = GenerateRequest(np.arange(3, dtype=np.int32), {}, 5)
        deadline = asyncio.get_running_loop().time() + 20
        result = await pool.sample(request, Affinity("1", "x"), deadline)
        assert (result.ids, failures, pool.errors) == ([5], 0, 3)
        assert (engine.quarantined, engine.failures) == (False, 0)
        await pool.close()


def sends(*pieces: bytes, then: str = "wait") -> Script:
    """Answers one request with these pieces; then waits for the client, closes or resets the connection."""

    async def script(connection: Scripted) -> None:
        await connection.request()
        for piece in pieces:
            await connection.send(piece)
            await asyncio.sleep(0)
        if then == "reset":
            connection.reset()
        elif then == "wait":
            await connection.until_closed()

    return script


async def answering(connection: Scripted) -> None:
    while True:
        await connection.request()
        await connection.reply(REPLY)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (sends(then="reset"), "closed without a reply"),
        (sends(then="close"), "closed without a reply"),
        (sends(OK + b"content-length: 900\r\n\r\n{", then="reset"), "closed in the middle of the reply"),
        (sends(CHUNKED + b"5\r\nhel", then="close"), "closed in the middle of the reply"),
        (sends(b"SSH-2.0-OpenSSH_9.6\r\n"), "invalid HTTP reply"),
        (sends(OK + b"content-length: -1\r\n\r\n"), "invalid HTTP reply"),
        (sends(OK + b"x-a: " + b"a" * 2**20, b"\r\n\r\n"), "invalid HTTP reply"),
        (sends(OK + b"x-a: 1\r\n" * 200, b"\r\n"), "invalid HTTP reply"),
    ],
    ids=["reset", "closed", "cut-reset", "cut-closed", "ssh", "length", "long-header", "many-headers"],
)
async def test_a_call_that_fails_is_not_sent_again(script: Script, words: str) -> None:
    """The engine may have sampled for it; the pool decides."""
    client = EngineClient(connect_s=5.0, probe_timeout_s=5.0)
    async with scripted(script) as server:
        with pytest.raises(OSError, match=words):
            await whole(client, server.url)
        assert len(server.connections) == 1
    await client.close()


async def test_an_engine_that_does_not_listen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    client = EngineClient(connect_s=5.0, probe_timeout_s=5.0)
    with pytest.raises(ConnectionError, match="cannot connect: ") as raised:
        await whole(client, url)
    assert raised.value.errno == errno.ECONNREFUSED
    with pytest.raises(ConnectionError, match="cannot connect: "):
        await whole(client, "http://nowhere.invalid")

    async def no_tls(connection: Scripted) -> None:
        await connection.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with scripted(no_tls) as server:
        with pytest.raises(ConnectionError, match="cannot connect: "):
            await whole(client, server.url.replace("http", "https"))
    await client.close()


@pytest.mark.parametrize("head", [b"", b"content-length: 900\r\n"])
async def test_a_body_that_is_too_large(monkeypatch: pytest.MonkeyPatch, head: bytes) -> None:
    monkeypatch.setattr(engines_client, "MAX_BODY", 10)
    client = EngineClient(connect_s=5.0, probe_timeout_s=5.0)
    async with scripted(sends(OK + head + b"\r\nhello world!")) as server:
        with pytest.raises(EngineError, match="a body of more than 10 bytes"):
            await whole(client, server.url)
        await server.connections[0].closed.wait()
    await client.close()


async def test_an_event_of_any_size_is_one_line() -> None:
    """The readers of lines that HTTP libraries have refuse lines of 64 KiB or 128 KiB."""
    ids = list(range(100_000))
    data = event(ids, last=True)
    assert len(data) > 2**21
    pieces = [chunk(data[at : at + 50_000]) for at in range(0, len(data), 50_000)]
    client = EngineClient(connect_s=5.0, probe_timeout_s=5.0)
    async with scripted(streaming(CHUNKED, *pieces, END)) as server:
        assert (await streamed(client, server.url))[-1].ids == ids
    await client.close()


async def test_a_stream_without_an_end_does_not_keep_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines_client, "_REST_S", 0.01)
    client = EngineClient(connect_s=5.0, probe_timeout_s=5.0)
    async with scripted(sends(CHUNKED + chunk(event([5], last=True)))) as server:
        assert (await streamed(client, server.url))[-1].finish == "stop"
        await server.connections[0].closed.wait()
    await client.close()


async def test_no_call_waits_for_the_connection_of_another() -> None:
    """aiohttp's default is 100 connections, and five minutes for a request."""
    client = EngineClient(connect_s=5.0, probe_timeout_s=5.0)
    reply = asyncio.Event()

    async def script(connection: Scripted) -> None:
        await connection.request()
        await reply.wait()
        await connection.reply(REPLY)

    async with scripted(*[script] * 150) as server:
        calls = [asyncio.create_task(whole(client, server.url)) for _ in range(150)]
        await eventually(lambda: sum(map(len, (one.requests for one in server.connections))) == 150)
        assert client.http.timeout == aiohttp.ClientTimeout(total=None)
        reply.set()
        assert await asyncio.gather(*calls) == [[5]] * 150
    await client.close()


async def test_a_cancelled_call_closes_its_connection() -> None:
    client = EngineClient(connect_s=5.0, probe_timeout_s=5.0)
    async with scripted(sends(), sends(CHUNKED + chunk(event([5])))) as server:
        before_head = asyncio.create_task(whole(client, server.url))
        await eventually(lambda: server.connections and server.connections[0].requests)
        before_head.cancel()
        await server.connections[0].closed.wait()
        taken: list[GenerateResult] = []
        within = asyncio.create_task(client.generate(server.url, b"{}", True, taken.append))
        await eventually(lambda: taken)
        within.cancel()
        await server.connections[1].closed.wait()
        results = await asyncio.gather(before_head, within, return_exceptions=True)
        assert [type(result) for result in results] == [asyncio.CancelledError] * 2
        assert client.http.connector is not None
        assert not client.http.connector._acquired
    await client.close()


async def test_a_cancelled_call_leaves_a_shared_lookup_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    lookups = 0
    found = asyncio.Event()
    resolve = aiohttp.ThreadedResolver.resolve

    async def lookup(self: aiohttp.ThreadedResolver, host: str, port: int, **options: Any) -> Any:
        nonlocal lookups
        lookups += 1
        await found.wait()
        return await resolve(self, "127.0.0.1", port, **options)

    monkeypatch.setattr(aiohttp.ThreadedResolver, "resolve", lookup)
    client = EngineClient(connect_s=5.0, probe_timeout_s=5.0)
    async with scripted(*[answering] * 5) as server:
        url = server.url.replace("127.0.0.1", "engine.example")
        calls = [asyncio.create_task(whole(client, url)) for _ in range(5)]
        await eventually(lambda: lookups)
        calls[0].cancel()
        found.set()
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert (results[1:], lookups) == ([[5]] * 4, 1)
        assert isinstance(results[0], asyncio.CancelledError)
    await client.close()


async def test_a_request_asks_for_no_compression_and_has_its_body_whole() -> None:
    client = EngineClient(connect_s=5.0, probe_timeout_s=5.0, key="k")
    body = b"{" + b" " * 3_000_000 + b"}"
    async with scripted(answering) as server:
        await client.generate(server.url + "/a b", body, False, lambda _: None)
        head, _, sent = server.connections[0].requests[0].partition(b"\r\n\r\n")
        lines = {line.lower() for line in head.split(b"\r\n")[1:]}
    assert (sent == body, head.startswith(b"POST /a%20b/generate HTTP/1.1\r\n")) == (True, True)
    assert {line for line in lines if not line.startswith(b"host:")} == {
        b"authorization: bearer k", b"content-type: application/json", b"accept: */*",
        b"content-length: %d" % len(body), b"x-tidegate-packed-lists: 1",
    }  # fmt: skip
    await client.close()


# ------------------------------------------------------------------ idle connections


async def test_a_connection_that_the_engine_closed_while_idle() -> None:
    client = EngineClient(connect_s=5.0, probe_timeout_s=5.0)
    script = sends(answer(REPLY), then="close")
    async with scripted(script, script) as server:
        for _ in range(2):
            assert await whole(client, server.url) == [5]
            await eventually(lambda: not idle(client))
    await client.close()


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_close_that_a_late_event_loop_has_not_processed(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """The engine is another thread, so that it closes while the client's event loop is blocked."""
    close, closed = threading.Event(), threading.Event()

    def serve(listening: socket.socket) -> None:
        for _ in range(2):
            connection, _ = listening.accept()
            connection.recv(2**16)
            connection.sendall(answer(REPLY))
            close.wait(10)
            connection.close()
            closed.set()

    async def calls() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            thread = asyncio.create_task(asyncio.to_thread(serve, listening))
            client = EngineClient(connect_s=5.0, probe_timeout_s=5.0)
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            assert await whole(client, url) == [5]
            close.set()
            closed.wait(10)  # blocks the event loop
            assert idle(client) == 1
            assert await whole(client, url) == [5]
            await thread
            await client.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(calls())


OTHER = answer(event([6], last=True)[6:-2])


@pytest.mark.parametrize(
    ("more", "idle_first"),
    [(OTHER, False), (OTHER, True), (b"surplus", True)],
    ids=["at-once", "idle-reply", "idle-bytes"],
)
async def test_bytes_that_were_not_asked_for_are_no_reply_to_the_next_request(
    more: bytes, idle_first: bool
) -> None:
    """A client that keeps the connection gives every further request the reply to the one before."""
    go = asyncio.Event()
    sent = asyncio.Event()

    async def script(connection: Scripted) -> None:
        await connection.request()
        await connection.send(answer(REPLY) + (b"" if idle_first else more))
        await go.wait()
        if idle_first:
            await connection.send(more)
        sent.set()
        await connection.until_closed()

    client = EngineClient(connect_s=5.0, probe_timeout_s=5.0)
    async with scripted(script, answering) as server:
        assert await whole(client, server.url) == [5]
        assert client.http.connector is not None
        kept = [one for connections in client.http.connector._conns.values() for one, _ in connections]
        go.set()
        await sent.wait()
        await eventually(lambda: all(protocol.should_close for protocol in kept))
        assert [await whole(client, server.url) for _ in range(2)] == [[5], [5]]
        await server.connections[0].closed.wait()
        assert len(server.connections) == 2
    await client.close()

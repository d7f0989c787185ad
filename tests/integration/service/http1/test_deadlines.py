"""Cancelling, timeouts, replies that are left, and limits. On the event loops of asyncio and of uvloop."""

from __future__ import annotations

import asyncio

import pytest

from tests.integration.service.http1.calls import (
    CHUNKED,
    LENGTH,
    OK,
    begun,
    block,
    idle_connections,
    in_bytes,
    on_each_loop,
    post,
    sends,
)
from tests.scripted_server import Scripted, scripted
from tests.waiting import eventually
from tidegate.service.http1 import connection as http1_connection
from tidegate.service.http1.client import Http1Client
from tidegate.service.http1.errors import (
    InvalidReply,
    ReadTimeout,
)
from tidegate.service.http1.origin import parse_url


@on_each_loop
async def test_cancelling_closes_the_connection(client: Http1Client) -> None:
    async with scripted(sends(), sends(OK + b"content-length: 11\r\n\r\nhello")) as server:
        before_head = asyncio.create_task(post(client, server.url))
        await eventually(lambda: server.connections and server.connections[0].requests)
        before_head.cancel()
        await server.connections[0].closed.wait()
        within_body = asyncio.create_task(post(client, server.url))
        await eventually(lambda: client._open)
        await eventually(lambda: any(one._reply and one._reply.status for one in client._open))
        within_body.cancel()
        await server.connections[1].closed.wait()
        results = await asyncio.gather(before_head, within_body, return_exceptions=True)
        assert [type(result) for result in results] == [asyncio.CancelledError] * 2


@on_each_loop
async def test_a_timeout_of_a_slow_server_closes_the_connection(client: Http1Client) -> None:
    async with scripted(sends()) as server:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await post(client, server.url)
        await server.connections[0].closed.wait()


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200", OK + b"content-length: 11\r\n\r\nhello"])
@on_each_loop
async def test_a_reply_that_stops(client: Http1Client, sent: bytes) -> None:
    async with scripted(sends(sent) if sent else sends()) as server:
        origin, _, headers = parse_url(server.url)
        request = b"GET / HTTP/1.1\r\n%b\r\n" % headers
        with pytest.raises(ReadTimeout, match="nothing was received for"):
            await (await client.send(origin, request, read_s=0.05)).read()
        await server.connections[0].closed.wait()


@on_each_loop
async def test_each_part_of_a_reply_has_the_time_to_arrive(client: Http1Client) -> None:
    async def script(connection: Scripted) -> None:
        await connection.request()
        for byte in in_bytes(OK[:10]):
            await connection.send(byte)
            await asyncio.sleep(0.03)
        await connection.send(LENGTH[10:])

    async with scripted(script) as server:
        origin, _, headers = parse_url(server.url)
        with await client.send(origin, b"GET / HTTP/1.1\r\n%b\r\n" % headers, read_s=0.2) as reply:
            assert await reply.read() == b"hello world"


@on_each_loop
async def test_a_reply_that_a_late_event_loop_reads_is_in_time(server_thread: str) -> None:
    client = Http1Client(connect_s=5.0, keepalive_s=3.0)
    origin, _, headers = parse_url(server_thread)
    request = b"GET / HTTP/1.1\r\n%b\r\n" % headers
    (await client.send(origin, request)).release()
    call = asyncio.create_task(client.send(origin, request, read_s=0.05))
    await asyncio.sleep(0)
    block(0.15)  # the reply arrives meanwhile
    assert await (await call).read() == b"ok"
    await client.close()


@on_each_loop
async def test_a_reply_that_is_left_closes_the_connection(client: Http1Client) -> None:
    async with scripted(sends(OK + b"content-length: 11\r\n\r\nhello")) as server:
        with await begun(client, server.url) as reply:
            assert await reply.piece() == b"hello"
        await server.connections[0].closed.wait()


@on_each_loop
async def test_a_released_reply_keeps_the_connection_when_its_rest_arrives(client: Http1Client) -> None:
    rest = asyncio.Event()

    async def script(connection: Scripted) -> None:
        await connection.request()
        await connection.send(OK + b"content-length: 11\r\n\r\nhello")
        await rest.wait()
        await connection.send(b" world")
        await connection.request()
        await connection.reply()

    async with scripted(script) as server:
        with await begun(client, server.url) as reply:
            assert await reply.piece() == b"hello"
            reply.release()
        assert not idle_connections(client)
        rest.set()
        await eventually(lambda: idle_connections(client))
        assert await post(client, server.url) == b"ok"
        assert len(server.connections) == 1


@on_each_loop
async def test_a_released_reply_whose_rest_does_not_arrive(
    client: Http1Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http1_connection, "_REST_S", 0.01)
    async with scripted(sends(OK + b"content-length: 11\r\n\r\nhello")) as server:
        with await begun(client, server.url) as reply:
            assert await reply.piece() == b"hello"
            reply.release()
        await server.connections[0].closed.wait()


@on_each_loop
async def test_a_slow_reader_makes_the_server_wait(client: Http1Client) -> None:
    size = 24 * 2**20
    sent = 0

    async def script(connection: Scripted) -> None:
        nonlocal sent
        await connection.request()
        await connection.send(OK + b"content-length: %d\r\n\r\n" % size)
        while sent < size:
            await connection.send(b"x" * 2**16)
            sent += 2**16

    async with scripted(script) as server:
        with await begun(client, server.url) as reply:
            await eventually(lambda: reply._connection._paused)
            buffered = reply._size
            assert buffered < 2 * 2**20
            received = 0
            while piece := await reply.piece():
                received += len(piece)
            assert received == size
        with await begun(client, server.url) as reply:
            assert await reply.read() == b"ok"


@on_each_loop
async def test_a_reply_read_as_a_whole_is_not_paused(client: Http1Client) -> None:
    size = 8 * 2**20
    async with scripted(sends(OK + b"content-length: %d\r\n\r\n" % size, b"x" * size)) as server:
        reply = await begun(client, server.url)
        await eventually(lambda: reply._connection._paused)
        assert len(await reply.read()) == size


@on_each_loop
async def test_limits_of_the_head_and_the_body(client: Http1Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1_connection, "MAX_BODY", 10)
    long = b"x-a: " + b"a" * 2**16
    async with scripted(sends(OK, long, long), sends(LENGTH), sends(CHUNKED)) as server:
        with pytest.raises(InvalidReply, match="headers of more than 65536 bytes"):
            await post(client, server.url)
        for _ in range(2):
            with pytest.raises(InvalidReply, match="body is larger than 10 bytes"):
                await post(client, server.url)
        for connection in server.connections:
            await connection.closed.wait()


@on_each_loop
async def test_a_long_stream_is_not_limited(client: Http1Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1_connection, "MAX_BODY", 10)
    more = asyncio.Semaphore(0)

    async def script(connection: Scripted) -> None:
        await connection.request()
        await connection.send(OK + b"content-length: 24\r\n\r\n")
        for _ in range(3):
            await connection.send(b"12345678")
            await more.acquire()

    async with scripted(script) as server:
        with await begun(client, server.url) as reply:
            while piece := await reply.piece():
                assert piece == b"12345678"
                more.release()

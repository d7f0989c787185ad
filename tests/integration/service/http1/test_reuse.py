"""Which connections are used again, and when idle ones are closed: on the loops of asyncio and of uvloop."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from tests.integration.service.http1.calls import (
    LENGTH,
    OK,
    begun,
    idle_connections,
    on_each_loop,
    post,
    sends,
)
from tests.scripted_server import Scripted, scripted
from tests.waiting import eventually
from tidegate.service.http1.client import Http1Client
from tidegate.service.http1.errors import (
    ConnectionLost,
)


@on_each_loop
async def test_a_connection_is_used_again(client: Http1Client) -> None:
    async with scripted() as server:
        for _ in range(3):
            assert await post(client, server.url) == b"ok"
        assert len(server.connections) == 1
        replies = await asyncio.gather(*(post(client, server.url) for _ in range(4)))
        assert (replies, len(server.connections)) == ([b"ok"] * 4, 4)


@pytest.mark.parametrize(
    "reply",
    [
        OK + b"connection: close\r\ncontent-length: 11\r\n\r\nhello world",
        b"HTTP/1.0 200 OK\r\ncontent-length: 11\r\n\r\nhello world",
        LENGTH + OK,
        LENGTH + LENGTH,
        LENGTH + b"surplus",
    ],
    ids=["close", "1.0", "half-a-reply-more", "a-reply-more", "bytes-more"],
)
@on_each_loop
async def test_a_connection_is_not_used_again(client: Http1Client, reply: bytes) -> None:
    async with scripted(sends(reply)) as server:
        assert await post(client, server.url) == b"hello world"
        assert await post(client, server.url) == b"ok"
        await server.connections[0].closed.wait()


@on_each_loop
async def test_bytes_that_nobody_asked_for_close_an_idle_connection(client: Http1Client) -> None:
    more = asyncio.Event()

    async def script(connection: Scripted) -> None:
        await connection.request()
        await connection.reply()
        await more.wait()
        await connection.send(LENGTH)
        await connection.until_closed()

    async with scripted(script) as server:
        assert await post(client, server.url) == b"ok"
        more.set()
        await server.connections[0].closed.wait()
        assert await post(client, server.url) == b"ok"


async def closing(connection: Scripted) -> None:
    """Answers one request, then closes."""
    await connection.request()
    await connection.reply()


@on_each_loop
async def test_a_connection_that_the_server_closed_while_idle(client: Http1Client) -> None:
    async with scripted(closing, closing) as server:
        assert await post(client, server.url) == b"ok"
        [idle] = idle_connections(client)
        await eventually(lambda: not idle_connections(client))
        assert await post(client, server.url) == b"ok"
        assert idle not in idle_connections(client)


@on_each_loop
async def test_a_close_that_a_late_event_loop_has_not_seen(client: Http1Client) -> None:
    """The server is another thread, so that it closes while the client's event loop is blocked."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        close, closed = threading.Event(), threading.Event()

        def serve() -> None:
            for _ in range(2):
                connection, _ = listening.accept()
                connection.recv(2**16)
                connection.sendall(OK + b"content-length: 2\r\n\r\nok")
                close.wait(10)
                connection.close()
                closed.set()

        thread = asyncio.create_task(asyncio.to_thread(serve))
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        reply = await begun(client, url)
        assert await reply.read() == b"ok"
        close.set()
        closed.wait(
            10
        )  # blocks the event loop, which has not processed the close when the next request begins
        assert len(idle_connections(client)) == 1
        assert await post(client, url) == b"ok"
        await thread


async def closing_at_the_next_request(connection: Scripted) -> None:
    """Closes as the second request arrives, as a server does whose close crossed the request."""
    await connection.request()
    await connection.reply()
    await connection.request()
    connection.reset()


@on_each_loop
async def test_a_request_that_crossed_the_close_of_an_idle_connection(client: Http1Client) -> None:
    async with scripted(closing_at_the_next_request) as server:
        assert await post(client, server.url) == b"ok"
        idle_connections(client)[0].idle_since -= 2.0
        assert await post(client, server.url) == b"ok"
        assert len(server.connections) == 2


@on_each_loop
async def test_a_server_that_exits_within_a_request_is_a_failure(client: Http1Client) -> None:
    """It had been in use just before, so that it did not close an idle connection."""
    async with scripted(closing_at_the_next_request) as server:
        assert await post(client, server.url) == b"ok"
        with pytest.raises(ConnectionLost, match="without a reply"):
            await post(client, server.url)
        assert len(server.connections) == 1


@pytest.mark.parametrize("part", [b"HTTP/1.1 200", b"HTTP/1.1 100 Continue\r\n\r\n"])
@on_each_loop
async def test_a_request_is_not_sent_again_once_something_was_received(
    client: Http1Client, part: bytes
) -> None:
    async def script(connection: Scripted) -> None:
        await closing(connection)
        await connection.request()
        await connection.send(part)

    async with scripted(script) as server:
        assert await post(client, server.url) == b"ok"
        idle_connections(client)[0].idle_since -= 2.0
        with pytest.raises(ConnectionLost, match="in the middle of its reply"):
            await post(client, server.url)
        assert len(server.connections) == 1


@on_each_loop
async def test_a_new_connection_that_is_closed_is_not_opened_again(client: Http1Client) -> None:
    async with scripted(sends(then="reset"), sends(then="close")) as server:
        for _ in range(2):
            with pytest.raises(ConnectionLost, match="without a reply"):
                await post(client, server.url)
        assert len(server.connections) == 2


@on_each_loop
async def test_idle_connections_are_closed_in_time() -> None:
    client = Http1Client(connect_s=5.0, keepalive_s=0.02)
    async with scripted() as server:
        for _ in range(2):
            await asyncio.gather(*(post(client, server.url) for _ in range(2)))
            for connection in server.connections:
                await connection.closed.wait()
        assert (len(server.connections), client._idle, client._open) == (4, {}, set())
    await client.close()


@on_each_loop
async def test_an_expired_connection_is_not_used(client: Http1Client) -> None:
    async with scripted() as server:
        await post(client, server.url)
        idle_connections(client)[0].idle_since -= 3.1
        await post(client, server.url)
        assert len(server.connections) == 2


@on_each_loop
async def test_closing_the_client_fails_its_calls() -> None:
    client = Http1Client(connect_s=5.0, keepalive_s=3.0)
    async with scripted(sends()) as server:
        call = asyncio.create_task(post(client, server.url))
        await eventually(lambda: server.connections and server.connections[0].requests)
        await client.close()
        with pytest.raises(ConnectionLost, match="the client was closed"):
            await call
        await server.connections[0].closed.wait()

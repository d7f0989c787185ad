"""Replies in each form, cut ones, and what is not HTTP. On the event loops of asyncio and of uvloop."""

from __future__ import annotations

import asyncio

import pytest

from tests.integration.service.http1.calls import (
    CHUNKED,
    LENGTH,
    OK,
    begun,
    in_bytes,
    on_each_loop,
    post,
    sends,
)
from tests.scripted_server import Script, Scripted, scripted
from tidegate.service.http1.client import Http1Client
from tidegate.service.http1.errors import (
    ConnectionLost,
    InvalidReply,
)


@pytest.mark.parametrize(
    "script",
    [
        sends(LENGTH),
        sends(*in_bytes(LENGTH)),
        sends(CHUNKED),
        sends(*in_bytes(CHUNKED)),
        sends(b"HTTP/1.1 100 Continue\r\n\r\n" + LENGTH),
        sends(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n", CHUNKED),
        sends(OK + b"\r\nhello", b" world", then="close"),
        sends(b"HTTP/1.0 200 OK\r\n\r\nhello world", then="close"),
        sends(b"HTTP/1.0 200 OK\r\ncontent-length: 11\r\n\r\nhello world", then="close"),
    ],
    ids=[
        "length",
        "length-bytes",
        "chunked",
        "chunked-bytes",
        "100",
        "103",
        "until-close",
        "1.0",
        "1.0-length",
    ],
)
@on_each_loop
async def test_a_reply_in_each_form(client: Http1Client, script: Script) -> None:
    async with scripted(script) as server:
        assert await post(client, server.url) == b"hello world"


@on_each_loop
async def test_a_reply_has_its_status_and_its_headers(client: Http1Client) -> None:
    async with scripted(
        sends(b"HTTP/1.1 503 Busy\r\nRetry-After: 1\r\ncontent-length: 2\r\n\r\nno")
    ) as server:
        with await begun(client, server.url) as reply:
            assert (reply.status, dict(reply.headers)[b"Retry-After"]) == (503, b"1")
            assert await reply.read() == b"no"


@on_each_loop
async def test_a_reply_without_a_body(client: Http1Client) -> None:
    async with scripted(sends(b"HTTP/1.1 204 No Content\r\n\r\n")) as server:
        assert await post(client, server.url) == b""


@on_each_loop
async def test_a_request_arrives_as_it_was_sent(client: Http1Client) -> None:
    async with scripted() as server:
        with await begun(client, server.url, b"x" * 3_000_000) as reply:
            assert await reply.read() == b"ok"
        [request] = server.connections[0].requests
        head, _, body = request.partition(b"\r\n\r\n")
        assert head.startswith(b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1:")
        assert body == b"x" * 3_000_000


@pytest.mark.parametrize("then", ["close", "reset"])
@pytest.mark.parametrize(
    "head", [OK + b"content-length: 11\r\n\r\n", OK + b"transfer-encoding: chunked\r\n\r\n5\r\n"]
)
@on_each_loop
async def test_a_reply_that_is_cut(client: Http1Client, head: bytes, then: str) -> None:
    cut = asyncio.Event()

    async def script(connection: Scripted) -> None:
        await connection.request()
        await connection.send(head + b"hello")
        await cut.wait()
        if then == "reset":
            connection.reset()

    async with scripted(script) as server:
        with await begun(client, server.url) as reply:
            assert await reply.piece() == b"hello"
            cut.set()
            with pytest.raises(ConnectionLost, match="in the middle of its reply"):
                await reply.piece()


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 999999 X\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        OK + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n",
        OK + b"content-length: -1\r\n\r\n",
        OK + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)
@on_each_loop
async def test_a_reply_that_is_not_http(client: Http1Client, answer: bytes) -> None:
    async with scripted(sends(answer)) as server:
        with pytest.raises(InvalidReply, match="invalid HTTP reply"):
            await post(client, server.url)
        await server.connections[0].closed.wait()

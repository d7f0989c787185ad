"""Calls of the HTTP/1.1 client, and scripted replies."""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

from tests.scripted_server import Script, Scripted
from tidegate.service.http1.client import Http1Client
from tidegate.service.http1.connection import Http1Reply
from tidegate.service.http1.origin import parse_url

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def on_each_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a test on each event loop, with a client if it takes one."""
    parameters = dict(inspect.signature(test).parameters)
    takes_client = parameters.pop("client", None) is not None

    @functools.wraps(test)
    def run(runner: asyncio.Runner, **arguments: Any) -> None:
        async def main() -> None:
            client = Http1Client(connect_s=5.0, keepalive_s=3.0)
            try:
                await test(**arguments, **({"client": client} if takes_client else {}))
            finally:
                await client.close()

        runner.run(main())

    own = inspect.Parameter("runner", inspect.Parameter.KEYWORD_ONLY)
    run.__signature__ = inspect.Signature([*parameters.values(), own])  # type: ignore[attr-defined]
    return run


async def begun(client: Http1Client, url: str, body: bytes = b"{}") -> Http1Reply:
    origin, path, headers = parse_url(url + "/generate")
    head = b"POST %b HTTP/1.1\r\n%bcontent-length: %d\r\n\r\n" % (path.encode(), headers, len(body))
    return await client.send(origin, head + body)


async def post(client: Http1Client, url: str) -> bytes:
    with await begun(client, url) as reply:
        return await reply.read()


def sends(*pieces: bytes, then: str = "wait") -> Script:
    """Answers one request with these pieces, each sent by itself; then waits for the client, or closes."""

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


def in_bytes(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


OK = b"HTTP/1.1 200 OK\r\n"


LENGTH = OK + b"x-a: 1\r\ncontent-length: 11\r\n\r\nhello world"


CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n6\r\n world\r\n0\r\nx-trailer: 1\r\n\r\n"


def block(seconds: float) -> None:
    time.sleep(seconds)


def idle_connections(client: Http1Client) -> list[Any]:
    return [connection for idle in client._idle.values() for connection in idle]

"""The floor: a forwarder on httptools alone, which reads a request, forwards it and responds.

    python -m turns.raw_forwarder UPSTREAM ANNOUNCE

It parses no JSON, keeps nothing and checks nothing.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path
from urllib.parse import urlsplit

import httptools
import orjson
import uvloop
from turns.load import Connection

from tidegate.service.serve import url_of, write_atomically

_HEAD = b"HTTP/1.1 %d OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
_PATH = b"/v1/chat/completions"


class Upstream:
    """Connections to the engine."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self._address = (address.hostname or "", address.port or 0)
        self._idle: list[Connection] = []

    async def post(self, body: bytes) -> tuple[int, bytes]:
        if self._idle:
            connection = self._idle.pop()
        else:
            _, connection = await asyncio.get_running_loop().create_connection(Connection, *self._address)
        answer = await connection.post(_PATH, b"key", body)
        self._idle.append(connection)
        return answer


class ForwardingConnection(asyncio.Protocol):
    """A client's connection, for one request at a time."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._parser = httptools.HttpRequestParser(self)
        self._body: list[bytes] = []
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._body = []

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._forward(b"".join(self._body)))

    async def _forward(self, body: bytes) -> None:
        status, answer = await self._upstream.post(body)
        self._transport.write(_HEAD % (status, len(answer), answer))


async def serve(upstream: Upstream, announce: Path) -> None:
    sock = socket.create_server(("127.0.0.1", 0), backlog=4096)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: ForwardingConnection(upstream), sock=sock, backlog=4096)
    write_atomically(announce, orjson.dumps({"url": url_of(sock)}).decode())
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(Upstream(sys.argv[1]), Path(sys.argv[2])))

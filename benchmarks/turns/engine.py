"""A fake engine with minimal cost: all replies are prepared in advance.

    python -m turns.engine REPLIES ANNOUNCE

It implements the engine protocol (`/generate`, whole and streamed) and OpenAI's chat completions, so that it
can serve all systems. REPLIES is the file written by `material.write_replies`; the engine writes its URL to
ANNOUNCE.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import httptools
import orjson
import uvloop

from tidegate.service.serve import url_of, write_atomically

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n%b"
_INFO = {"weight_version": "7", "max_context": 131072, "object": "list", "data": [{"id": "m"}]}


class Replies:
    """Prepared responses by kind of request, returned in rotation."""

    def __init__(self, path: Path) -> None:
        rows = orjson.loads(path.read_bytes())
        self._rounds: dict[str, Iterator[bytes]] = {}
        for kind in ("generate", "events", "chat", "chat_events", "traced"):
            frame = _STREAM if kind.endswith("events") else _HEAD
            bodies = [row[kind].encode() for row in rows]
            self._rounds[kind] = itertools.cycle([frame % (len(body), body) for body in bodies])
        info = orjson.dumps(_INFO)
        self._info = _HEAD % (len(info), info)

    def to(self, url: bytes, body: bytes) -> bytes:
        if url == b"/generate":
            return next(self._rounds["events" if b'"stream":true' in body else "generate"])
        if url == b"/v1/chat/completions":
            if b'"stream":true' in body:
                return next(self._rounds["chat_events"])
            return next(self._rounds["traced" if b'"return_token_ids"' in body else "chat"])
        return self._info


class Connection(asyncio.Protocol):
    def __init__(self, replies: Replies) -> None:
        self._replies = replies
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._url, self._body = b"", []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._transport.write(self._replies.to(self._url, b"".join(self._body)))


async def serve(replies: Replies, announce: Path) -> None:
    sock = socket.create_server(("127.0.0.1", 0), backlog=4096)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(replies), sock=sock, backlog=4096)
    write_atomically(announce, orjson.dumps({"url": url_of(sock)}).decode())
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(Replies(Path(sys.argv[1])), Path(sys.argv[2])))

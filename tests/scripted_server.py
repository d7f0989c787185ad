"""A TCP server whose connections follow scripts, to fault HTTP clients byte by byte."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


class Scripted:
    """One connection of the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.requests: list[bytes] = []
        self.closed = asyncio.Event()
        """Set when the client has closed it."""

    async def request(self) -> bytes:
        """Reads a request; returns its head and body. Raises IncompleteReadError if the client closes."""
        head = await self._reader.readuntil(b"\r\n\r\n")
        found = _LENGTH.search(head)
        self.requests.append(head + await self._reader.readexactly(int(found[1]) if found else 0))
        return self.requests[-1]

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def reply(self, body: bytes = b"ok", headers: bytes = b"") -> None:
        await self.send(b"HTTP/1.1 200 OK\r\n%bcontent-length: %d\r\n\r\n%b" % (headers, len(body), body))

    def reset(self) -> None:
        self._writer.transport.abort()

    async def until_closed(self) -> None:
        """Waits until the client closes the connection."""
        with contextlib.suppress(OSError):
            while await self._reader.read(2**16):
                pass
        self.closed.set()


Script = Callable[[Scripted], Awaitable[None]]


async def answering(connection: Scripted) -> None:
    """Answers every request with `ok`."""
    with contextlib.suppress(asyncio.IncompleteReadError, OSError):
        while True:
            await connection.request()
            await connection.reply()
    connection.closed.set()


class ScriptedServer:
    """`scripts` are those of the next connections; further ones follow `answering`."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts = deque(scripts)
        self.connections: list[Scripted] = []
        self.url = ""
        self._tasks: set[asyncio.Task[None]] = set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Scripted(reader, writer)
        self.connections.append(connection)
        script = self.scripts.popleft() if self.scripts else answering
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            # Cancelled only as the server stops.
            with contextlib.suppress(asyncio.IncompleteReadError, OSError, asyncio.CancelledError):
                await script(connection)
        finally:
            self._tasks.discard(task)
            writer.close()


@contextlib.asynccontextmanager
async def scripted(*scripts: Script) -> AsyncIterator[ScriptedServer]:
    """Runs a server on a port of its own."""
    server = ScriptedServer(*scripts)
    listening = await asyncio.start_server(server._serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listening.close()
        for task in list(server._tasks):
            task.cancel()
        await asyncio.gather(*server._tasks, return_exceptions=True)

"""A connection of the HTTP/1.1 client, and the reply that it receives."""

from __future__ import annotations

import asyncio
import select
import time
from typing import Any, Protocol, Self

import httptools

from tidegate.service.http1.errors import ConnectionLost, InvalidReply, ReadTimeout
from tidegate.service.http1.origin import Origin

MAX_HEAD = 64 * 1024
"""Bytes of a reply's status line and headers."""
MAX_BODY = 256 * 2**20
"""Bytes of a reply that is read as a whole."""
_BUFFER = 2**20
"""Bytes that a reply that is read in pieces may buffer before the server must wait."""
_REST_S = 1.0


class Http1Reply:
    """A reply whose head was received. Used as a context manager, which closes the connection if the reply is
    not complete by then."""

    __slots__ = (
        "_chunks",
        "_complete",
        "_connection",
        "_error",
        "_read_s",
        "_released",
        "_size",
        "_timer",
        "_waiter",
        "_whole",
        "headers",
        "status",
    )

    def __init__(self, connection: Connection, read_s: float | None) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._connection = connection
        self._read_s = read_s
        self._chunks: list[bytes] = []
        self._size = 0
        """Bytes of `_chunks`."""
        self._whole = False
        self._released = False
        self._complete = False
        self._error: OSError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._released:
            self.close()

    def close(self) -> None:
        """Closes the connection unless the reply is complete."""
        if not self._complete:
            self._connection.abort()

    async def head(self) -> None:
        """Waits for the status and the headers. Raises ConnectionLost or InvalidReply."""
        while not self.status:
            await self._change()

    async def read(self) -> bytes:
        """Returns the body. Raises ConnectionLost or InvalidReply."""
        self._whole = True
        self._connection.resume()
        while not self._complete:
            await self._change()
        chunks, self._chunks = self._chunks, []
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    async def piece(self) -> bytes:
        """Returns the next bytes of the body as they arrive, and b"" at its end. Raises ConnectionLost or
        InvalidReply after what was received."""
        while not self._chunks:
            if self._complete:
                return b""
            await self._change()
        chunks, self._chunks, self._size = self._chunks, [], 0
        self._connection.resume()
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def release(self) -> None:
        """Leaves the rest of the body unread; the connection is kept if it arrives within _REST_S seconds."""
        if not self._complete:
            self._released = True
            self._connection.resume()
            asyncio.get_running_loop().call_later(_REST_S, self.close)

    async def _change(self) -> None:
        if self._error is not None:
            raise self._error
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        if self._read_s is not None:
            self._timer = loop.call_later(self._read_s, self._time_out, self._read_s)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _time_out(self, read_s: float) -> None:
        if self._waiter is None or self._waiter.done():
            return  # the event loop was late
        loop = asyncio.get_running_loop()
        rest = self._connection.received_at + read_s - loop.time()
        if rest > 0:  # something was received that was no reason to wake, as a part of the head
            self._timer = loop.call_later(rest, self._time_out, read_s)
        else:
            self._connection.fail(ReadTimeout(f"nothing was received for {read_s:g} s"))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- called by the connection ----------------------------------------------------------------

    def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status, self.headers = status, headers
        self._wake()

    def add(self, chunk: bytes) -> None:
        if self._released:
            return
        self._chunks.append(chunk)
        self._size += len(chunk)
        if self._size > MAX_BODY:
            self._connection.fail(InvalidReply(f"the body is larger than {MAX_BODY} bytes"))
        elif self._size > _BUFFER and not self._whole:
            self._connection.pause()
        self._wake()

    def complete(self) -> None:
        self._complete = True
        self._wake()

    def fail(self, error: OSError) -> None:
        self._error = error
        self._wake()


class Owner(Protocol):
    """What a connection calls of its client."""

    keepalive_s: float

    def opened(self, connection: Connection) -> None: ...

    def release(self, connection: Connection, origin: Origin) -> None: ...

    def lost(self, connection: Connection, origin: Origin) -> None: ...


class Connection(asyncio.Protocol):
    """A connection, for one request at a time."""

    def __init__(self, client: Owner, origin: Origin) -> None:
        self._client = client
        self._origin = origin
        self._transport: Any = None
        self._poll = select.poll()
        self._parser = httptools.HttpResponseParser(self)
        self._reply: Http1Reply | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._keep_alive = False
        self._head_size = 0
        """Bytes received before the end of the headers; 0 after it."""
        self._complete = False
        self._paused = False
        self.received = False
        """Whether anything was received since the last request."""
        self.received_at = 0.0
        """On the event loop's clock."""
        self._loop = asyncio.get_running_loop()
        self.idle_since = 0.0
        """On the clock of `time.monotonic()`: the event loop's own time stands still while it is blocked."""

    def request(self, data: bytes, read_s: float | None) -> Http1Reply:
        self._reply = reply = Http1Reply(self, read_s)
        self._head_size, self._complete, self.received = 1, False, False
        self._transport.write(data)
        return reply

    def usable(self, idle_s: float) -> bool:
        """Whether the server keeps the idle connection open. The check finds a close that the event loop has
        not processed yet, because it is late."""
        if idle_s > self._client.keepalive_s or self._transport.is_closing():
            return False
        return not self._poll.poll(0)

    def abort(self) -> None:
        self._reply = None
        self._transport.abort()

    def pause(self) -> None:
        if not self._paused and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def fail(self, error: OSError) -> None:
        reply = self._reply
        self.abort()
        if reply is not None:
            reply.fail(error)

    # -- asyncio.Protocol ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
        self._client.opened(self)

    def data_received(self, data: bytes) -> None:
        if self._reply is None:
            self._transport.abort()  # no reply was asked for
            return
        self.received, self.received_at = True, self._loop.time()
        if self._head_size:
            self._head_size += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self._complete:
                self.fail(InvalidReply(f"{self._origin} sent an invalid HTTP reply: {error}"))
                return
            self._keep_alive = False
        if self._complete:
            self._end()
        elif self._head_size > MAX_HEAD:
            self.fail(InvalidReply(f"{self._origin} sent headers of more than {MAX_HEAD} bytes"))

    def connection_lost(self, error: Exception | None) -> None:
        self._client.lost(self, self._origin)
        reply, self._reply = self._reply, None
        if reply is None:
            return
        if error is None and not self._head_size and self._ends_with_connection():
            reply.complete()
        else:
            when = "in the middle of its reply" if self.received else "without a reply"
            lost = ConnectionLost(
                f"{self._origin} closed the connection {when}{f': {error}' if error else ''}"
            )
            lost.errno = getattr(error, "errno", None)
            reply.fail(lost)

    def _ends_with_connection(self) -> bool:
        names = {name.lower() for name, _ in self._headers}
        return not names & {b"content-length", b"transfer-encoding"}

    def _end(self) -> None:
        """Ends a reply; the connection is kept if the server keeps it."""
        reply, self._reply = self._reply, None
        self.resume()
        if self._keep_alive and not self._transport.is_closing():
            self.idle_since = time.monotonic()
            self._client.release(self, self._origin)
        else:
            self._transport.close()
        if reply is not None:
            reply.complete()

    # -- httptools -------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._headers = []
        if self._complete:
            self._keep_alive = False  # a second reply to one request

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200 and not self._complete and self._reply is not None:
            self._keep_alive = self._parser.should_keep_alive()
            self._head_size = 0
            self._reply.begin(status, self._headers)

    def on_body(self, body: bytes) -> None:
        if self._reply is not None and not self._complete:
            self._reply.add(body)

    def on_message_complete(self) -> None:
        self._complete = self._complete or not self._head_size

"""An HTTP/1.1 client on httptools, for calls so frequent that a general client's overhead counts.

It keeps connections alive and reads a reply as a whole or in pieces. It follows no redirects, uses no
proxies, keeps no cookies and decodes no content encodings: callers that need these use aiohttp or httpx.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ipaddress
import select
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple, Self
from urllib.parse import quote, unquote, urlsplit

import aiohappyeyeballs
import httptools

MAX_HEAD = 64 * 1024
"""Bytes of a reply's status line and headers."""
MAX_BODY = 256 * 2**20
"""Bytes of a reply that is read as a whole."""
_BUFFER = 2**20
"""Bytes that a reply that is read in pieces may buffer before the server must wait."""
_TICKS = 20
_STALE_S = 1.0
"""A connection that was idle for longer than this, and fails sooner than this, was closed while idle."""
_REST_S = 1.0
_PATH_CHARACTERS = "/?%:@!$&'()*+,;=~[]"
"""Those that stand for themselves in a path and its query."""
_NAMES_S = 10.0
"""Seconds for which a resolved host name is used."""


class ConnectTimeout(TimeoutError):
    """A connection was not established in time."""


class ConnectFailed(ConnectionError):
    """A connection was refused, or the host name could not be resolved. `errno` is that of the cause."""


class ReadTimeout(TimeoutError):
    """Nothing was received in time."""


class ConnectionLost(ConnectionError):
    """The server closed the connection before its reply was complete. `errno` is set if it was reset."""


class InvalidReply(OSError):
    """A reply is not HTTP, or exceeds a limit."""


@contextlib.asynccontextmanager
async def delay_tolerant_timeout(seconds: float) -> AsyncIterator[None]:
    """Raises TimeoutError after `seconds`, and not before the loop has run _TICKS iterations. With thousands
    of concurrent sessions the event loop is late by seconds. A wall-clock timeout would then fail connections
    that were established but not yet processed, and quarantine a healthy engine."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as timeout:

        def tick(remaining: int) -> None:
            if remaining == 0:
                timeout.reschedule(loop.time())
            else:
                next_tick[:] = [loop.call_later(seconds / _TICKS, tick, remaining - 1)]

        next_tick: list[asyncio.TimerHandle] = []
        tick(_TICKS)
        try:
            yield
        finally:
            next_tick[0].cancel()


class Origin(NamedTuple):
    """The server that a URL names."""

    host: str
    port: int
    tls: bool

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"


def parse_url(url: str) -> tuple[Origin, str, bytes]:
    """Splits a URL.

    Returns:
        The origin, the path with its query, and the headers that the URL determines: `host`, and
        `authorization` for a URL with a user name.

    Raises:
        ValueError: It is not a valid HTTP URL.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not an HTTP URL")
    tls = parts.scheme == "https"
    if not parts.hostname.isprintable() or " " in parts.hostname:
        raise ValueError(f"{url!r} has an invalid host name")
    host = parts.hostname if parts.hostname.isascii() else parts.hostname.encode("idna").decode()
    origin = Origin(host, parts.port or (443 if tls else 80), tls)
    path = quote((parts.path or "/") + (f"?{parts.query}" if parts.query else ""), _PATH_CHARACTERS)
    name = f"[{host}]" if ":" in host else host
    headers = f"host: {name}:{parts.port}\r\n" if parts.port else f"host: {name}\r\n"
    if parts.username is not None:
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        headers += f"authorization: Basic {base64.b64encode(login).decode()}\r\n"
    return origin, path, headers.encode()


class Http1Client:
    """Sends requests and keeps connections, without a limit of their number. For one event loop.

    Args:
        connect_s: Timeout of a connection in seconds; a reply has none.
        keepalive_s: Seconds for which an idle connection is kept. Less than the servers' own, so that a
            server does not close a connection as a request is sent.
        tls: Returns the context of TLS connections.
    """

    def __init__(
        self,
        connect_s: float,
        keepalive_s: float,
        tls: Callable[[], ssl.SSLContext] = ssl.create_default_context,
    ) -> None:
        self.keepalive_s = keepalive_s
        self._connect_s = connect_s
        self._idle: dict[Origin, dict[_Connection, None]] = {}
        self._open: set[_Connection] = set()
        self._names: dict[Origin, tuple[asyncio.Future[Any], float]] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self._new_context = tls
        self._tls: ssl.SSLContext | None = None

    async def send(
        self, origin: Origin, data: bytes, *, connect_s: float | None = None, read_s: float | None = None
    ) -> Http1Reply:
        """Sends a request and waits for the head of its reply.

        A request on a connection that the server had closed while it was idle is sent again on a new one.
        Cancelling closes the connection.

        Args:
            origin: The server.
            data: The complete request.
            connect_s: Timeout of a connection in seconds; None: the client's.
            read_s: Longest time in seconds between two parts of the reply; None: unlimited.

        Raises:
            ConnectTimeout, ConnectFailed: There is no connection; nothing was sent.
            ReadTimeout: Nothing was received for `read_s`.
            ConnectionLost: The connection was closed without a reply or within its head.
            InvalidReply: The reply is not HTTP, or its head exceeds MAX_HEAD.
        """
        began = time.monotonic()
        connection = self._take(origin, began)
        if connection is not None:
            try:
                return await _exchange(connection, data, read_s)
            except ConnectionLost:
                was_idle = began - connection.idle_since >= _STALE_S > time.monotonic() - began
                if connection.received or not was_idle:
                    raise
        connect_s = self._connect_s if connect_s is None else connect_s
        return await _exchange(await self._connect(origin, connect_s), data, read_s)

    async def close(self) -> None:
        """Closes the connections."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for lookup, _ in self._names.values():
            lookup.cancel()
        for connection in list(self._open):
            connection.fail(ConnectionLost("the client was closed"))
        await asyncio.sleep(0)  # the event loop closes their sockets

    def _take(self, origin: Origin, now: float) -> _Connection | None:
        """Returns the connection that was used last and is still open; None if there is none."""
        idle = self._idle.get(origin)
        while idle:
            connection, _ = idle.popitem()
            if connection.usable(now - connection.idle_since):
                return connection
            connection.abort()
        return None

    async def _connect(self, origin: Origin, connect_s: float) -> _Connection:
        try:
            async with delay_tolerant_timeout(connect_s):
                return await self._open_connection(origin)
        except TimeoutError:
            message = f"connecting to {origin} took longer than {connect_s:g} s"
            raise ConnectTimeout(message) from None
        except (OSError, UnicodeError) as error:
            failure = ConnectFailed(f"cannot connect to {origin}: {error}")
            failure.errno = getattr(error, "errno", None)
            raise failure from error

    async def _open_connection(self, origin: Origin) -> _Connection:
        options: dict[str, Any] = {}
        if origin.tls:
            self._tls = self._tls or self._new_context()
            options = {"ssl": self._tls, "server_hostname": origin.host}
        if _is_address(origin.host):
            options |= {"host": origin.host, "port": origin.port}
        else:
            addresses = await self._resolve(origin)
            options["sock"] = await aiohappyeyeballs.start_connection(addresses, happy_eyeballs_delay=0.25)
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: _Connection(self, origin), **options)
        return connection

    async def _resolve(self, origin: Origin) -> Any:
        """Returns the addresses of a host name. Concurrent calls share one lookup."""
        loop = asyncio.get_running_loop()
        lookup, expires = self._names.get(origin, (None, 0.0))
        if lookup is None or loop.time() > expires:
            lookup = asyncio.ensure_future(_lookup(origin.host, origin.port))
            self._names[origin] = (lookup, loop.time() + _NAMES_S)
            lookup.add_done_callback(lambda done: self._on_resolved(origin, done))
        return await asyncio.shield(lookup)

    def _on_resolved(self, origin: Origin, lookup: asyncio.Future[Any]) -> None:
        if lookup.cancelled() or lookup.exception() is not None:
            self._names.pop(origin, None)

    # -- called by connections -------------------------------------------------------------------

    def opened(self, connection: _Connection) -> None:
        self._open.add(connection)

    def release(self, connection: _Connection, origin: Origin) -> None:
        self._idle.setdefault(origin, {})[connection] = None
        if self._sweeper is None:
            loop = asyncio.get_running_loop()
            self._sweeper = loop.call_later(self.keepalive_s, self._close_expired)

    def lost(self, connection: _Connection, origin: Origin) -> None:
        self._open.discard(connection)
        self._idle.get(origin, {}).pop(connection, None)

    def _close_expired(self) -> None:
        self._sweeper = None
        oldest = time.monotonic() - self.keepalive_s
        for origin, idle in list(self._idle.items()):
            for connection in [one for one in idle if one.idle_since <= oldest]:
                del idle[connection]
                connection.abort()
            if not idle:
                del self._idle[origin]
        if self._idle:
            loop = asyncio.get_running_loop()
            self._sweeper = loop.call_later(self.keepalive_s, self._close_expired)


async def _lookup(host: str, port: int) -> Any:
    return await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)


async def _exchange(connection: _Connection, data: bytes, read_s: float | None) -> Http1Reply:
    reply = connection.request(data, read_s)
    try:
        await reply.head()
    except BaseException:
        reply.close()
        raise
    return reply


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


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

    def __init__(self, connection: _Connection, read_s: float | None) -> None:
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


class _Connection(asyncio.Protocol):
    """A connection, for one request at a time."""

    def __init__(self, client: Http1Client, origin: Origin) -> None:
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

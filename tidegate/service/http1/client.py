"""An HTTP/1.1 client on httptools, for calls so frequent that a general client's overhead counts.

It keeps connections alive and reads a reply as a whole or in pieces. It follows no redirects, uses no
proxies, keeps no cookies and decodes no content encodings: callers that need these use aiohttp or httpx.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohappyeyeballs

from tidegate.service.http1.connection import Connection, Http1Reply
from tidegate.service.http1.errors import ConnectFailed, ConnectionLost, ConnectTimeout
from tidegate.service.http1.origin import Origin

_TICKS = 20
_STALE_S = 1.0
"""A connection that was idle for longer than this, and fails sooner than this, was closed while idle."""
_NAMES_S = 10.0
"""Seconds for which a resolved host name is used."""


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
        self._idle: dict[Origin, dict[Connection, None]] = {}
        self._open: set[Connection] = set()
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

    def _take(self, origin: Origin, now: float) -> Connection | None:
        """Returns the connection that was used last and is still open; None if there is none."""
        idle = self._idle.get(origin)
        while idle:
            connection, _ = idle.popitem()
            if connection.usable(now - connection.idle_since):
                return connection
            connection.abort()
        return None

    async def _connect(self, origin: Origin, connect_s: float) -> Connection:
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

    async def _open_connection(self, origin: Origin) -> Connection:
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
        _, connection = await loop.create_connection(lambda: Connection(self, origin), **options)
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

    def opened(self, connection: Connection) -> None:
        self._open.add(connection)

    def release(self, connection: Connection, origin: Origin) -> None:
        self._idle.setdefault(origin, {})[connection] = None
        if self._sweeper is None:
            loop = asyncio.get_running_loop()
            self._sweeper = loop.call_later(self.keepalive_s, self._close_expired)

    def lost(self, connection: Connection, origin: Origin) -> None:
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


async def _exchange(connection: Connection, data: bytes, read_s: float | None) -> Http1Reply:
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

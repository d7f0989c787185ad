"""A complete request of a route that bypasses ASGI, whose overhead would exceed the route's work."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Protocol

import httptools

log = logging.getLogger("tidegate.service.direct.request")

MAX_REQUEST = 64 * 1024
"""Bytes of a request; longer ones go through ASGI."""
MAX_HEADERS = 128
"""Number of a request's headers and trailers."""


Headers = Iterable[tuple[bytes, bytes]]
JSON: Headers = ((b"content-type", b"application/json"),)


class Responder(Protocol):
    """The connection of a request."""

    def answer(self, status: int, body: bytes, headers: Headers) -> None:
        """Sends a complete response."""

    def begin(self, status: int, headers: Headers) -> None:
        """Sends the head of a response whose body is sent in parts."""

    def write(self, data: bytes, *, last: bool) -> None:
        """Sends a part of that body."""

    async def drain(self) -> None:
        """Waits while the client reads more slowly than parts are sent."""

    def spawn(self, job: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts a task that the server awaits, and cancels at last, when it stops."""

    def abort(self) -> None:
        """Closes the connection within a response."""


class DirectRequest:
    """A request that is answered once, now or later, on its server's event loop."""

    __slots__ = (
        "_connection", "begun", "body", "completes", "disconnected", "headers", "on_disconnect", "parameter",
        "query", "waits",
    )  # fmt: skip

    def __init__(
        self,
        headers: Mapping[bytes, bytes],
        body: bytes,
        connection: Responder,
        parameter: str = "",
        query: bytes = b"",
    ) -> None:
        self.headers = headers
        """By lower-case name."""
        self.body = body
        self.parameter = parameter
        """Path segment for which the route has `{}`."""
        self.query = query
        self.on_disconnect: Callable[[], object] | None = None
        """Called if the client disconnects, or the server stops, before the request is answered."""
        self.completes = False
        """Whether a server that stops waits for the answer, instead of ending the request."""
        self.waits = False
        """Whether it waits for something that may be given to one that is still there: the response is not
        sent to a client that has closed its side."""
        self.disconnected = False
        self._connection = connection
        self.begun = False

    def respond(self, status: int, body: bytes, headers: Headers = JSON) -> None:
        """Sends a response, unless the client has disconnected or the request was answered."""
        if not self.disconnected:
            self.disconnected = True  # from this request
            self._connection.answer(status, body, headers)

    def begin(self, status: int, headers: Headers) -> None:
        """Begins a response whose body is sent in parts."""
        if not self.disconnected:
            self.begun = True
            self._connection.begin(status, headers)

    def write(self, data: bytes, *, last: bool) -> None:
        """Sends a part of the body after `begin`; the last one ends the response."""
        if not self.disconnected:
            self.disconnected = last
            self._connection.write(data, last=last)

    async def drain(self) -> None:
        await self._connection.drain()

    def disconnect(self) -> None:
        """Ends the request without an answer."""
        if not self.disconnected:
            self.disconnected = True
            if self.on_disconnect is not None:
                self.on_disconnect()

    def start(self, job: Coroutine[Any, Any, None], *, cancels: bool = True) -> None:
        """Runs a coroutine that answers the request; with `cancels`, a disconnect cancels it.

        Its failure is logged and answered with 500.
        """
        task = self._connection.spawn(self._guard(job))
        if cancels:
            self.on_disconnect = task.cancel

    async def _guard(self, job: Coroutine[Any, Any, None]) -> None:
        try:
            await job
        except Exception as error:  # noqa: BLE001 - logged, and answered with 500
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Logs an unexpected error and answers with 500, or closes the connection within a response."""
        log.error("a request failed", exc_info=error)
        if not self.begun:
            self.respond(500, _FAILED)
        elif not self.disconnected:
            self.disconnected = True
            self._connection.abort()


_FAILED = b'{"error":{"message":"internal error; see the log","type":"server_error"}}'

DirectRoute = Callable[[DirectRequest], bool]
"""Begins to serve a request; returns False, without effects, to leave it to ASGI, as one that is refused."""


class CompleteRequest:
    """The result of parsing bytes that should be exactly one plain HTTP/1.1 request."""

    def __init__(self) -> None:
        self.headers: dict[bytes, bytes] = {}
        self.body = b""

    @classmethod
    def parse(cls, data: bytes) -> CompleteRequest | None:
        """Returns the request; None unless it is complete, alone and plain (see `_plain`)."""
        end = data.find(b"\r\n\r\n")
        if end < 0 or len(data) > MAX_REQUEST:
            return None
        request = cls()
        parser = httptools.HttpRequestParser(request)
        try:
            parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            return None
        plain = parser.get_http_version() == "1.1" and request._plain(len(data) - end - 4)
        return request if plain else None

    def _plain(self, length: int) -> bool:
        """Whether it has a body of this length and no header that ASGI's middleware would evaluate."""
        return (
            self.headers.get(b"content-length", b"0") == str(length).encode()
            and b"host" in self.headers
            and self.headers.get(b"connection", b"keep-alive").lower() == b"keep-alive"
            and len(self.headers) <= MAX_HEADERS
            and not any(name.startswith(b"x-forwarded-") or name in _OTHERS for name in self.headers)
        )

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        self.body += body


_OTHERS = frozenset({b"transfer-encoding", b"expect", b"upgrade"})

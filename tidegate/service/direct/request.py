"""A complete request of a route that bypasses ASGI, whose overhead would exceed the route's work."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import httptools

log = logging.getLogger("tidegate.service.direct.request")

MAX_REQUEST = 64 * 1024
"""Bytes of a request; longer ones go through ASGI."""


class DirectRequest:
    """A request that is answered once, now or later, on its server's event loop."""

    __slots__ = ("_answer", "_spawn", "body", "disconnected", "headers", "on_disconnect")

    def __init__(
        self,
        headers: Mapping[bytes, bytes],
        body: bytes,
        answer: Callable[[int, bytes], None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self.headers = headers
        """By lower-case name."""
        self.body = body
        self.on_disconnect: Callable[[], object] | None = None
        """Called if the client disconnects, or the server stops, before the request is answered."""
        self.disconnected = False
        self._answer = answer
        self._spawn = spawn

    def respond(self, status: int, body: bytes) -> None:
        """Sends a JSON response, unless the client has disconnected or the request was answered."""
        if not self.disconnected:
            self.disconnected = True  # from this request
            self._answer(status, body)

    def disconnect(self) -> None:
        """Ends the request without an answer."""
        if not self.disconnected:
            self.disconnected = True
            if self.on_disconnect is not None:
                self.on_disconnect()

    def start(self, job: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine that answers the request; a disconnect cancels it.

        Its failure is logged and answered with 500.
        """
        self.on_disconnect = self._spawn(self._guard(job)).cancel

    async def _guard(self, job: Coroutine[Any, Any, None]) -> None:
        try:
            await job
        except Exception as error:  # noqa: BLE001 - logged, and answered with 500
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Logs an unexpected error and answers with 500."""
        log.error("a request failed", exc_info=error)
        self.respond(500, b'{"error":{"message":"internal error; see the log","type":"server_error"}}')


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
            self.headers.get(b"content-length") == str(length).encode()
            and b"host" in self.headers
            and self.headers.get(b"connection", b"keep-alive").lower() == b"keep-alive"
            and not any(name.startswith(b"x-forwarded-") or name in _OTHERS for name in self.headers)
        )

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        self.body += body


_OTHERS = frozenset({b"transfer-encoding", b"expect", b"upgrade"})

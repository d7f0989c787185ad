"""Bounds what clients that have not shown a key can cost a server, and answers those that half-close."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD = 64 * 1024
"""Bytes of a request's line, headers and trailers."""
MAX_HEADERS = 128
"""Number of a request's headers and trailers."""
HEAD_S = 30.0
"""Seconds in which the headers of a request must arrive, and its first byte on a new connection."""
LINGER_S, LINGER_BYTES = 2.0, 1024 * 1024
"""Limits of what a refused client may still send, unread: a connection that is closed at once is reset, and
the refusal lost."""
GONE_S, PROBE_S = 0.2, 5.0
"""Seconds after which a client that has closed its side of the connection is probed, and between probes."""
TAKING = ("/groups/lease", "/attempts/next")
"""Ends of paths whose response is lost if the client has left: a closed side counts as leaving at once."""
TCP_CLOSED = 7
"""State of a socket in TCP_INFO, once the client has reset the connection."""
_REFUSALS = {
    408: (b"408 Request Timeout", f"the headers did not arrive within {HEAD_S:g} s"),
    431: (
        b"431 Request Header Fields Too Large",
        f"the headers have more than {MAX_HEAD} bytes or {MAX_HEADERS} fields; send fewer or shorter ones",
    ),
    503: (b"503 Service Unavailable", "the server stops"),
}


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits of the headers' bytes, number and time (431, 408).

    A client that closes its side after a request gets the response. It cannot be told at once from one that
    has left: an interim response (100), which resets the connection of the latter, shows the difference.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._within = False
        """Whether a request has begun to arrive."""
        self._fields = self._head_bytes = 0
        """Headers and trailers of the request."""
        self._pending = 0
        """Bytes that the parser has not understood."""
        self._refused = False
        self._head_since: float | None = None
        """Time since which headers are awaited; None while none are."""
        self._timer: asyncio.TimerHandle | None = None
        self._prober: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._head_since = self.loop.time()
        self._timer = self.loop.call_later(HEAD_S, self._check_time)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._timer, self._prober):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            self._pending += len(data)
            if self._pending > LINGER_BYTES:
                self.transport.abort()
            return
        if not self._within and self._head_since is None:
            self._head_since = self.loop.time()
        self._pending += len(data)
        super().data_received(data)
        if self._pending > MAX_HEAD:
            self._refuse(431)

    def _check_time(self) -> None:
        since, now = self._head_since, self.loop.time()
        left = HEAD_S if since is None else since + HEAD_S - now
        if left > 0:
            self._timer = self.loop.call_later(left, self._check_time)
        elif self._within:
            self._refuse(408)
        else:
            self.transport.close()

    def _refuse(self, status: int) -> None:
        """Answers a request that is not read further, and closes the connection."""
        if self._refused or self.transport.is_closing():
            return
        self._refused, self._head_since = True, None
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            line, text = _REFUSALS[status]
            kind = "server_error" if status >= 500 else "invalid_request_error"
            error = {"message": text, "type": kind, "code": status}
            body = json.dumps({"error": error}).encode()
            head = b"HTTP/1.1 %b\r\nconnection: close\r\ncontent-type: application/json\r\n" % line
            self.transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            self.transport.write_eof()
        self._pending, self._prober = 0, self.loop.call_later(LINGER_S, self.transport.close)

    def shutdown(self) -> None:
        """Ends a wait at once, as if its client had left; a server that stops awaits all other responses."""
        cycle = self.cycle
        waits = cycle is not None and not cycle.response_started and cycle.scope["path"].endswith(TAKING)
        super().shutdown()
        if waits:
            self._refuse(503)
            cycle.disconnected = True
            cycle.message_event.set()

    # -- a client that closes its side -----------------------------------------------------------

    def eof_received(self) -> bool:  # type: ignore[override]
        """Returns whether the connection stays open, for a response to a complete request."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            return False
        if cycle.scope["path"].endswith(TAKING):
            return False
        if cycle.response_started and cycle.keep_alive:
            return False  # a client that closes a stream, which must be known at once
        cycle.keep_alive = False
        self._prober = self.loop.call_later(GONE_S, self._probe, GONE_S)
        return True

    def _probe(self, next_s: float) -> None:
        """Ends the connection of a client that has left: it has reset the one that an earlier call probed."""
        if self.transport.is_closing():
            return
        with contextlib.suppress(OSError):
            known = self.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
            if known[0] == TCP_CLOSED:
                self.transport.abort()
                return
        if not self.cycle.response_started and self.cycle.scope["http_version"] == "1.1":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._prober = self.loop.call_later(next_s, self._probe, PROBE_S)

    # -- the parser's calls ----------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._within = True
        self._fields = self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += 1
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def _count(self, size: int) -> None:
        """Counts a part of the head; an exception ends the parser, which calls `send_400_response`."""
        self._pending -= size
        self._head_bytes += size
        if self._exceeds():
            raise ValueError(_REFUSALS[431][1])

    def _exceeds(self) -> bool:
        return self._head_bytes > MAX_HEAD or self._fields > MAX_HEADERS

    def on_headers_complete(self) -> None:
        self._head_since, self._pending = None, 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._pending = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._within, self._pending = False, 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        if self._exceeds():
            self._refuse(431)
        else:
            super().send_400_response(msg)

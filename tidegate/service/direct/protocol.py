"""uvicorn's HTTP protocol with less work for short requests.

It writes the head of a response together with the first part of its body, and can serve routes without ASGI.
"""

from __future__ import annotations

import asyncio
import string
from collections.abc import Coroutine, Mapping
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from tidegate.service.direct.bounds import BoundedProtocol
from tidegate.service.direct.request import JSON, CompleteRequest, DirectRequest, DirectRoute, Headers

_HEAD = b"HTTP/1."


class _JoiningTransport:
    """Holds the head of a response back until the next write, or the next iteration of the event loop.

    uvicorn writes head and body separately, and each write is a system call, which costs a short response
    more than all else.
    """

    __slots__ = ("_head", "_loop", "_transport")

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""

    def write(self, data: bytes) -> None:
        if self._head:
            self._transport.write(self._head + data)
            self._head = b""
        elif data.startswith(_HEAD) and data.endswith(b"\r\n\r\n"):
            self._head = data
            self._loop.call_soon(self._flush)
        else:
            self._transport.write(data)

    def _flush(self) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class JoiningProtocol(BoundedProtocol):
    """For `uvicorn.Config(http=…)`."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(_JoiningTransport(transport, self.loop))


class DirectProtocol(JoiningProtocol):
    """Serves some routes itself; all other requests go through ASGI.

    A request is served directly if it arrives in one piece while its connection is idle, if it is plain (see
    `CompleteRequest.parse`) and its route accepts it. ASGI must have the same route for those that are not.
    """

    routes: Mapping[bytes, DirectRoute] = {}
    """By request line, as `b"POST /path HTTP/1.1"`, without the query. A second path segment `{}` stands for
    any name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._direct: DirectRequest | None = None
        self._last = False
        """The server stops: the response closes the connection."""
        self._held = b""
        """What arrived while a request was served directly."""

    @classmethod
    def serving(cls, routes: Mapping[bytes, DirectRoute]) -> type[DirectProtocol]:
        """Returns the protocol with these routes."""
        return type("RoutedProtocol", (cls,), {"routes": routes})

    def data_received(self, data: bytes) -> None:
        if self._direct is not None:
            self._held += data
            self.flow.pause_reading()  # until the answer
        elif self._refused or not self._serve(data):
            super().data_received(data)

    def _serve(self, data: bytes) -> bool:
        line = data[: data.find(b"\r\n")]
        route, parameter, query = self._find(line)
        busy = self._within or (self.cycle is not None and not self.cycle.response_complete)
        if route is None or busy or (complete := CompleteRequest.parse(data)) is None:
            return False
        self._unset_keepalive_if_required()
        self._direct = request = DirectRequest(complete.headers, complete.body, self, parameter, query)
        try:
            served = route(request)
        except Exception as error:  # noqa: BLE001 - logged, and answered with 500
            request.fail(error)
            return True
        if served:
            self._head_since = None
        else:
            self._direct = None
        return served

    def _find(self, line: bytes) -> tuple[DirectRoute | None, str, bytes]:
        """Returns the route of a request line, the name in its path, and its query."""
        if (route := self.routes.get(line)) is not None:
            return route, "", b""
        query = b""
        if b"?" in line:
            path, _, rest = line.partition(b"?")
            query, _, version = rest.rpartition(b" ")
            line = b"%b %b" % (path, version)
        parts = line.split(b"/", 3)
        if len(parts) < 4 or not parts[2] or parts[2].translate(None, _NAME_BYTES):
            return (self.routes.get(line), "", query)
        return self.routes.get(b"%b/%b/{}/%b" % (parts[0], parts[1], parts[3])), parts[2].decode(), query

    # -- called by the request -------------------------------------------------------------------

    def answer(self, status: int, body: bytes, headers: Headers) -> None:
        self._direct = None
        if not self.transport.is_closing():
            self.transport.write(self._head(status, headers, len(body)) + body)
            self._end()

    def begin(self, status: int, headers: Headers) -> None:
        if not self.transport.is_closing():
            self.transport.write(self._head(status, headers, None))

    def write(self, data: bytes, *, last: bool) -> None:
        if last:
            self._direct = None
        if self.transport.is_closing():
            return
        chunk = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
        self.transport.write(chunk + b"0\r\n\r\n" if last else chunk)
        if last:
            self._end()

    async def drain(self) -> None:
        if self.flow.write_paused:
            await self.flow.drain()

    def abort(self) -> None:
        self._direct = None
        self.transport.close()

    def spawn(self, job: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.loop.create_task(job)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def _head(self, status: int, headers: Headers, length: int | None) -> bytes:
        """Returns the head of a response; its body is sent in chunks without a `length`."""
        parts = [STATUS_LINE[status]]
        for name, value in (*self.server_state.default_headers, *headers):
            if name != b"content-length":
                parts += (name, b": ", value, b"\r\n")
        if self._last:
            parts.append(b"connection: close\r\n")
        parts.append(
            b"transfer-encoding: chunked\r\n" if length is None else b"content-length: %d\r\n" % length
        )
        parts.append(b"\r\n")
        return b"".join(parts)

    def _end(self) -> None:
        """Ends a response; the connection waits for the next request."""
        if self._last:
            self.transport.close()
            return
        self.on_response_complete()
        if self._held:
            held, self._held = self._held, b""
            self.data_received(held)

    # -- connection ------------------------------------------------------------------------------

    def connection_lost(self, exc: Exception | None) -> None:
        if self._direct is not None:
            request, self._direct = self._direct, None
            request.disconnect()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        if (request := self._direct) is None:
            return super().eof_received()
        if request.begun or request.waits or self._held:
            return False
        self._last = True
        self._await_answer()
        return True

    def _accepts_interim(self) -> bool:
        return not self._direct.begun if self._direct is not None else super()._accepts_interim()

    def shutdown(self) -> None:
        request = self._direct
        if request is None:
            super().shutdown()
            return
        self._last = True
        if not request.completes:
            request.disconnect()
            self.answer(503, _STOPS, JSON)


_STOPS = b'{"error":{"message":"the server stops","type":"server_error","code":503}}'
_NAME_BYTES = (string.ascii_letters + string.digits + "-_.").encode()
"""Bytes of names in paths that need no decoding."""

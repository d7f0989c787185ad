"""uvicorn's HTTP protocol with less work for short requests.

It writes the head of a response together with the first part of its body, and can serve routes without ASGI.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from tidegate.service.direct.request import CompleteRequest, DirectRequest, DirectRoute

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


class JoiningProtocol(HttpToolsProtocol):
    """For `uvicorn.Config(http=…)`."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(_JoiningTransport(transport, self.loop))  # type: ignore[arg-type]


class DirectProtocol(JoiningProtocol):
    """Serves some routes itself; all other requests go through ASGI.

    A request is served directly if it arrives in one piece while its connection is idle, if it is plain (see
    `CompleteRequest.parse`) and its route accepts it. ASGI must have the same route for those that are not.
    """

    routes: Mapping[bytes, DirectRoute] = {}
    """By request line, as `b"POST /path HTTP/1.1"`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._within = False
        """Whether a request has begun to arrive."""
        self._direct: DirectRequest | None = None
        self._held = b""
        """What arrived while a request was served directly."""

    @classmethod
    def serving(cls, routes: Mapping[bytes, DirectRoute]) -> type[DirectProtocol]:
        """Returns the protocol with these routes."""
        return type("RoutedProtocol", (cls,), {"routes": routes})

    def on_message_begin(self) -> None:
        self._within = True
        super().on_message_begin()

    def on_message_complete(self) -> None:
        self._within = False
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        if self._direct is not None:
            self._held += data
            self.flow.pause_reading()  # until the answer
        elif not self._serve(data):
            super().data_received(data)

    def _serve(self, data: bytes) -> bool:
        route = self.routes.get(data[: data.find(b"\r\n")])
        busy = self._within or (self.cycle is not None and not self.cycle.response_complete)
        if route is None or busy or (complete := CompleteRequest.parse(data)) is None:
            return False
        self._unset_keepalive_if_required()
        self._direct = request = DirectRequest(complete.headers, complete.body, self._answer, self._spawn)
        try:
            served = route(request)
        except Exception as error:  # noqa: BLE001 - logged, and answered with 500
            request.fail(error)
            return True
        if not served:
            self._direct = None
        return served

    def _answer(self, status: int, body: bytes, *, close: bool = False) -> None:
        self._direct = None
        if self.transport.is_closing():
            return
        parts = [STATUS_LINE[status]]
        for name, value in self.server_state.default_headers:
            parts += (name, b": ", value, b"\r\n")
        parts.append(b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body))
        parts += (b"connection: close\r\n\r\n" if close else b"\r\n", body)
        self.transport.write(b"".join(parts))
        if close:
            self.transport.close()
            return
        self.on_response_complete()
        if self._held:
            held, self._held = self._held, b""
            self.data_received(held)

    def _spawn(self, job: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.loop.create_task(job)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def connection_lost(self, exc: Exception | None) -> None:
        if self._direct is not None:
            request, self._direct = self._direct, None
            request.disconnect()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        if self._direct is None:
            super().shutdown()
            return
        self._direct.disconnect()
        self._answer(503, _STOPS, close=True)


_STOPS = b'{"error":{"message":"the server stops","type":"server_error","code":503}}'

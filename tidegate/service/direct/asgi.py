"""Runs an ASGI endpoint for a direct request, so that both ways to a route share its code."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message

from tidegate.service.direct.request import DirectRequest


class DirectReceive:
    """The `receive` of a request that has arrived completely."""

    __slots__ = ("_body", "disconnected")

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self.disconnected: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def take(self) -> bytes | None:
        """Returns the body; None if it was taken before."""
        body, self._body = self._body, None
        return body

    async def __call__(self) -> Message:
        body = self.take()
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        await asyncio.wait((self.disconnected,))
        return {"type": "http.disconnect"}

    def disconnect(self) -> None:
        if not self.disconnected.done():
            self.disconnected.set_result(None)


class DirectSend:
    """The `send` of a direct request. The head is sent with the first part of the body."""

    __slots__ = ("_request", "_start")

    def __init__(self, request: DirectRequest) -> None:
        self._request = request
        self._start: Message | None = None

    async def __call__(self, message: Message) -> None:
        request, start = self._request, self._start
        if request.disconnected:
            return
        if message["type"] == "http.response.start":
            self._start = message
            return
        await request.drain()
        body, last = message.get("body", b""), not message.get("more_body")
        self._start = None
        if start is not None and last:
            request.respond(start["status"], body, start["headers"])
            return
        if start is not None:
            request.begin(start["status"], start["headers"])
        request.write(body, last=last)


def serve_endpoint(endpoint: ASGIApp, request: DirectRequest) -> bool:
    """Serves a request by an endpoint, as a `DirectRoute`.

    The endpoint's scope has the headers and, in `path_params`, the `session_id` of the path. A disconnect
    does not cancel it, and a server that stops lets it complete.
    """
    receive = DirectReceive(request.body)
    scope = {
        "type": "http",
        "headers": list(request.headers.items()),
        "path_params": {"session_id": request.parameter} if request.parameter else {},
    }
    request.completes = True
    request.start(endpoint(scope, receive, DirectSend(request)), cancels=False)  # type: ignore[arg-type]
    request.on_disconnect = receive.disconnect
    return True

"""Writes the response to one data-plane request, as one body or as a stream, in its dialect."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import orjson
from starlette.responses import Response
from starlette.types import Receive, Send

from tidegate.gateway.dialects.base import Dialect, ParsedRequest, ServedModel
from tidegate.gateway.errors import ApiError, session_closed
from tidegate.gateway.metrics import GatewayMetrics
from tidegate.gateway.sessions.model_calls import ModelCall
from tidegate.gateway.sessions.session import GatewaySession
from tidegate.gateway.turns.pipeline import TurnPipeline

T = TypeVar("T")
KEEP_ALIVE_S = 10.0
JSON = b"application/json"
_EVENTS = b"text/event-stream; charset=utf-8"
_NO_RETRY = (b"x-should-retry", b"false")


class ResponseWriter:
    """Sends the results of a request's calls; an early disconnect abandons or closes them."""

    def __init__(
        self,
        session: GatewaySession,
        dialect: Dialect,
        request: ParsedRequest,
        calls: Sequence[ModelCall],
        turns: TurnPipeline,
        metrics: GatewayMetrics,
        model: ServedModel,
    ) -> None:
        self._session = session
        self._dialect = dialect
        self._request = request
        self._calls = calls
        self._turns = turns
        self._metrics = metrics
        self._model = model
        self._updated = asyncio.Event()
        self._idle = False

    async def run(self, receive: Receive, send: Send) -> None:
        for call in self._calls:
            call.listeners.add(self._updated)
        disconnected = asyncio.ensure_future(receive())  # the only message after a complete request
        disconnected.add_done_callback(self._on_disconnect)
        delivered = False
        try:
            send_reply = self._send_stream if self._request.stream else self._send_body
            delivered = await send_reply(disconnected, send)
        finally:
            for call in self._calls:
                call.listeners.discard(self._updated)
                if not delivered:
                    self._turns.on_disconnect(self._session, call, closed=disconnected.done())
            disconnected.remove_done_callback(self._on_disconnect)
            disconnected.cancel()

    def _on_disconnect(self, _: asyncio.Future[Any]) -> None:
        self._updated.set()

    async def _send_body(self, disconnected: asyncio.Future[Any], send: Send) -> bool:
        """Sends one body; returns whether the reply was delivered."""
        while (refusal := self._refusal()) is None and not (self._done() or disconnected.done()):
            await self._wait_for_update()
        if refusal is not None:
            self._session.note_refusal(refusal)
            await refuse(send, self._dialect, refusal, self._metrics)
            return False
        # Before `_deliver`: a reply that nobody can receive must not count as read.
        if disconnected.done():
            return False
        body = self._request.body(self._calls, self._model)
        # Before the bytes leave: the client's next request may arrive before `respond` returns.
        self._deliver()
        await respond(send, 200, body)
        self._sent()
        return True

    async def _send_stream(self, disconnected: asyncio.Future[Any], send: Send) -> bool:
        """Sends server-sent events; returns whether the complete reply was delivered.

        The status is sent with the first token, so that an error before it has its own status, but no later
        than the first keep-alive.
        """
        events = self._request.events(self._calls, self._model)
        sent_parts = [0] * len(self._calls)
        started, data = False, b""
        timer = _IdleTimer(KEEP_ALIVE_S, self._on_idle)
        try:
            while True:
                done, refusal = self._done(), self._refusal()
                if refusal is not None:
                    self._session.note_refusal(refusal)
                if refusal is not None and not started:
                    await refuse(send, self._dialect, refusal, self._metrics)
                    return False
                if not started and (done or self._idle or any(call.reader.parts for call in self._calls)):
                    started, data = True, events.start()
                    await send(_start(200, _EVENTS, [(b"cache-control", b"no-cache")]))
                    continue  # the state may have changed while sending
                for choice, call in enumerate(self._calls):
                    parts = call.reader.parts[sent_parts[choice] :]
                    data += b"".join([events.part(choice, part) for part in parts])
                    sent_parts[choice] += len(parts)
                if refusal is not None:
                    count(self._metrics, refusal)
                    await send({"type": "http.response.body", "body": data + events.error(refusal)})
                    return False
                if disconnected.done():
                    return False
                if done:
                    self._deliver()
                    await send({"type": "http.response.body", "body": data + events.end()})
                    self._sent()
                    return True
                if self._idle and not data:
                    data = events.ping
                if data:
                    self._idle = False
                    timer.restart()
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                    data = b""
                    for call, parts_sent in zip(self._calls, sent_parts, strict=True):
                        call.delivered_parts = max(call.delivered_parts, parts_sent)
                await self._wait_for_update()
        finally:
            timer.cancel()

    async def _wait_for_update(self) -> None:
        """Waits for more parts, the end of a call, a disconnect or the keep-alive interval."""
        await self._updated.wait()
        self._updated.clear()

    def _on_idle(self) -> None:
        self._idle = True
        self._updated.set()

    def _done(self) -> bool:
        return all(call.done for call in self._calls)

    def _refusal(self) -> ApiError | None:
        """Returns the first error among the calls: if one fails, all do."""
        for call in self._calls:
            if call.refusal is not None:
                return call.refusal
        closed = self._session.closed
        if closed is None or not self._done():
            return None
        # The session ended between reply and delivery: its record must not change any more.
        all_delivered = all(call.node is not None and call.node.turn.delivered for call in self._calls)
        return None if all_delivered else session_closed(closed)

    def _deliver(self) -> None:
        for call in self._calls:
            self._turns.deliver(self._session, call)

    def _sent(self) -> None:
        for call in self._calls:
            self._turns.on_sent(self._session, call)


class _IdleTimer:
    """Calls `callback` whenever `seconds` pass without a restart."""

    def __init__(self, seconds: float, callback: Callable[[], None]) -> None:
        self._seconds = seconds
        self._callback = callback
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time() + seconds
        self._handle = self._loop.call_at(self._due, self._fire)

    def restart(self) -> None:
        """Runs once per token, so it only moves the due time; the timer is rescheduled when it fires."""
        self._due = self._loop.time() + self._seconds

    def cancel(self) -> None:
        self._handle.cancel()

    def _fire(self) -> None:
        if self._loop.time() >= self._due:
            self.restart()
            self._callback()
        self._handle = self._loop.call_at(self._due, self._fire)


def count(metrics: GatewayMetrics, refusal: ApiError) -> None:
    metrics.refusals[refusal.code or refusal.type] += 1


async def refuse(send: Send, dialect: Dialect, refusal: ApiError, metrics: GatewayMetrics) -> None:
    """Sends an error in the dialect's format."""
    count(metrics, refusal)
    headers = [] if refusal.retryable else [_NO_RETRY]
    await respond(send, refusal.status, dialect.error(refusal), headers)


def _start(status: int, content_type: bytes, headers: Iterable[tuple[bytes, bytes]]) -> dict[str, Any]:
    return {
        "type": "http.response.start",
        "status": status,
        "headers": [(b"content-type", content_type), *headers],
    }


def error_response(message: str, status: int) -> Response:
    """Returns an error of the control plane."""
    body = orjson.dumps({"error": {"message": message, "type": "gateway_error", "code": status}})
    headers = {} if status >= 500 or status == 408 else {"x-should-retry": "false"}
    return Response(body, status, headers, "application/json")


async def unless_disconnected(
    receive: Receive, leasing: Coroutine[Any, Any, list[T]], release: Callable[[list[T]], Awaitable[None]]
) -> list[T] | None:
    """Returns the leased groups; None if the client disconnects first, and the groups are released."""
    lease = asyncio.create_task(leasing)
    gone = asyncio.ensure_future(receive())
    connected = False
    try:
        await asyncio.wait((lease, gone), return_when=asyncio.FIRST_COMPLETED)
        connected = not gone.done()
        return lease.result() if connected else None
    finally:
        gone.cancel()
        if not connected:
            lease.cancel()
            [groups] = await asyncio.gather(lease, return_exceptions=True)
            if isinstance(groups, list):
                await release(groups)


async def respond(
    send: Send,
    status: int,
    body: bytes,
    headers: Iterable[tuple[bytes, bytes]] = (),
    content_type: bytes = JSON,
) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send(_start(status, content_type, [length, *headers]))
    await send({"type": "http.response.body", "body": body})

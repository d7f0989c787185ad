"""One request of the data plane on its way to its answer, whole or streamed, in whatever dialect."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from starlette.types import Receive, Send

from tidegate.gateway.dialects.base import Dialect, ParsedRequest, ServedModel
from tidegate.gateway.errors import ApiError, session_closed
from tidegate.gateway.metrics import GatewayMetrics
from tidegate.gateway.sessions.calls import PendingTurn
from tidegate.gateway.sessions.session import GatewaySession
from tidegate.gateway.turns.pipeline import TurnPipeline

KEEP_ALIVE_S = 10.0
JSON = b"application/json"
_EVENTS = b"text/event-stream; charset=utf-8"
_NO_RETRY = (b"x-should-retry", b"false")


class ResponseWriter:
    """Sends what its calls give; a client that leaves before the end abandons or closes them."""

    def __init__(
        self,
        session: GatewaySession,
        dialect: Dialect,
        request: ParsedRequest,
        calls: Sequence[PendingTurn],
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
        self._bell = asyncio.Event()
        self._silent = False

    async def run(self, receive: Receive, send: Send) -> None:
        for call in self._calls:
            call.bells.add(self._bell)
        gone = asyncio.ensure_future(receive())  # the request is read: what comes now is a disconnect
        gone.add_done_callback(lambda _: self._bell.set())
        delivered = False
        try:
            answer = self._stream if self._request.stream else self._whole
            delivered = await answer(gone, send)
        finally:
            for call in self._calls:
                call.bells.discard(self._bell)
                if not delivered:
                    self._turns.abandon(self._session, call, closed=gone.done())
            gone.cancel()

    async def _whole(self, gone: asyncio.Future[Any], send: Send) -> bool:
        """Whether the reply went out."""
        while (refusal := self._refusal()) is None and not (self._done() or gone.done()):
            await self._news()
        if refusal is not None:
            self._session.note_refusal(refusal)
            await refuse(send, self._dialect, refusal, self._metrics)
            return False
        if gone.done():
            return False
        body = self._request.whole(self._calls, self._model)
        self._deliver()
        await respond(send, 200, body)
        self._sent()
        return True

    async def _stream(self, gone: asyncio.Future[Any], send: Send) -> bool:
        """Server-sent events. The status waits for the first token, so that a refusal can have its own;
        but not for longer than a client may wait for a sign of life."""
        events = self._request.events(self._calls, self._model)
        sent = [0] * len(self._calls)
        started, data = False, b""
        timer = _Repeated(KEEP_ALIVE_S, self._grew_silent)
        try:
            while True:
                done, refusal = self._done(), self._refusal()
                if refusal is not None:
                    self._session.note_refusal(refusal)
                if refusal is not None and not started:
                    await refuse(send, self._dialect, refusal, self._metrics)
                    return False
                if not started and (done or self._silent or any(call.reader.parts for call in self._calls)):
                    started, data = True, events.start()
                    await send(_start(200, _EVENTS, [(b"cache-control", b"no-cache")]))
                    continue  # what was true before that may not be true any more
                for choice, call in enumerate(self._calls):
                    parts = call.reader.parts[sent[choice] :]
                    data += b"".join([events.part(choice, part) for part in parts])
                    sent[choice] += len(parts)
                if refusal is not None:
                    count(self._metrics, refusal)
                    await send({"type": "http.response.body", "body": data + events.error(refusal)})
                    return False
                if gone.done():
                    return False
                if done:
                    self._deliver()
                    await send({"type": "http.response.body", "body": data + events.end()})
                    self._sent()
                    return True
                if self._silent and not data:
                    data = events.ping
                if data:
                    self._silent = False
                    timer.restart()
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                    data = b""
                    for call, parts_sent in zip(self._calls, sent, strict=True):
                        call.given = max(call.given, parts_sent)
                await self._news()
        finally:
            timer.cancel()

    async def _news(self) -> None:
        """Until there are more parts, a call is done, the client is gone, or it was silent for long."""
        await self._bell.wait()
        self._bell.clear()

    def _grew_silent(self) -> None:
        self._silent = True
        self._bell.set()

    def _done(self) -> bool:
        return all(call.done for call in self._calls)

    def _refusal(self) -> ApiError | None:
        """The first refusal among the calls: one that fails fails them all."""
        for call in self._calls:
            if call.refusal is not None:
                return call.refusal
        closed = self._session.closed
        if closed is None or not self._done():
            return None
        # The session ended between the reply and its delivery: what is recorded must not change any more.
        taken = all(call.node is not None and call.node.turn.delivered for call in self._calls)
        return None if taken else session_closed(closed)

    def _deliver(self) -> None:
        for call in self._calls:
            self._turns.deliver(self._session, call)

    def _sent(self) -> None:
        for call in self._calls:
            self._turns.sent(self._session, call)


class _Repeated:
    """Calls back whenever nothing restarted it for `seconds`."""

    def __init__(self, seconds: float, callback: Callable[[], None]) -> None:
        self._seconds = seconds
        self._callback = callback
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time() + seconds
        self._handle = self._loop.call_at(self._due, self._fire)

    def restart(self) -> None:
        """Cheap, for it runs once a token: the timer itself is left as it is until it fires."""
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
    """Answer with a refusal, in the dialect's own shape."""
    count(metrics, refusal)
    headers = [] if refusal.retryable else [_NO_RETRY]
    await respond(send, refusal.status, dialect.error(refusal), headers)


def _start(status: int, content_type: bytes, headers: Iterable[tuple[bytes, bytes]]) -> dict[str, Any]:
    return {
        "type": "http.response.start",
        "status": status,
        "headers": [(b"content-type", content_type), *headers],
    }


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

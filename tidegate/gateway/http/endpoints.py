"""Serves the dialects, which agents call. Raw ASGI, as its overhead counts in every turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tidegate.errors import GatewayError
from tidegate.gateway.clients.conversations import Conversations
from tidegate.gateway.dialects import chat, completions, messages, responses
from tidegate.gateway.dialects.base import Dialect, ParsedRequest, ServedModel
from tidegate.gateway.errors import ApiError, session_closed
from tidegate.gateway.gateway import Gateway
from tidegate.gateway.http.base import (
    authenticate,
    client_name,
    count,
    internal_error,
    redacted,
    refuse,
    replay,
    respond,
    response_start,
)
from tidegate.gateway.http.models import CountEndpoint, ModelsEndpoint
from tidegate.gateway.sessions.model_calls import ModelCall
from tidegate.gateway.sessions.session import GatewaySession
from tidegate.gateway.turns.redaction import redact_text
from tidegate.gateway.turns.request_reader import ClientGone, RequestReader, read_body

TRAIN_HEADER = b"x-tidegate-train"
"""Header: `no` exempts the request's turn from training, `yes` trains on it whatever its model name."""
KEEP_ALIVE_S = 10.0
_EVENTS = b"text/event-stream; charset=utf-8"


def routes(gateway: Gateway, conversations: Conversations) -> list[Route]:
    """Returns the routes that the keys of sessions and of projects open."""
    endpoints: list[tuple[str, str, ASGIApp]] = [
        ("POST", "/chat/completions", DialectEndpoint(gateway, chat, conversations)),
        ("POST", "/completions", DialectEndpoint(gateway, completions, conversations)),
        ("POST", "/responses", DialectEndpoint(gateway, responses, conversations)),
        ("POST", "/messages", DialectEndpoint(gateway, messages, conversations)),
        ("POST", "/messages/count_tokens", CountEndpoint(gateway)),
        ("GET", "/models", ModelsEndpoint(gateway)),
        ("GET", "/models/{name:path}", ModelsEndpoint(gateway)),
    ]
    return [
        Route(base + path, endpoint, methods=[method])
        for base in ("/s/{session_id}/v1", "/v1")
        for method, path, endpoint in endpoints
    ]


class DialectEndpoint:
    """Endpoint of one dialect, such as `POST …/chat/completions`."""

    def __init__(self, gateway: Gateway, dialect: Dialect, conversations: Conversations) -> None:
        self._gateway = gateway
        self._dialect = dialect
        self._conversations = conversations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway, session = self._gateway, None
        try:
            headers = dict(scope["headers"])
            client = client_name(gateway, scope, headers)
            if client is None:
                session = authenticate(gateway, scope, headers)
            self._check_rate(client if session is None else session.client)
            flow = f"key {client}" if session is None else session.affinity.flow
            with gateway.bodies.counted(flow, receive) as counted:
                if session is None or gateway.options.redact is not None:
                    body = await redacted(gateway, await read_body(counted))
                    session = session or await self._conversations.session_of(
                        client or "", self._dialect, body, headers
                    )
                    counted = replay(body, counted)
                    del body  # what is large is not held while the reply is sampled
                await gateway.states.ready(session)
                request, calls = await self._read_request(session, headers, counted)
        except ClientGone:
            return
        except (ApiError, GatewayError) as error:
            refusal = error if isinstance(error, ApiError) else refused(error)
            if session is not None:
                session.note_refusal(_unread(gateway, refusal))
            await refuse(send, self._dialect, refusal, gateway.metrics)
            return
        except Exception as error:  # noqa: BLE001 - logged and returned to the client as an internal error
            await refuse(send, self._dialect, internal_error(session, error), gateway.metrics)
            return
        await ResponseWriter(gateway, session, self._dialect, request, calls).run(receive, send)

    def _check_rate(self, client: str | None) -> None:
        """Counts a call of a client's key. Raises ApiError (429) above the key's limit."""
        if client is not None and (key := self._gateway.keys.named(client)) is not None:
            self._conversations.rates.check(key)

    async def _read_request(
        self, session: GatewaySession, headers: dict[bytes, bytes], receive: Receive
    ) -> tuple[ParsedRequest, list[ModelCall]]:
        """Reads a request and starts its calls; if one is refused, all are.

        A retry of a call is recognised by its position in the request.
        """
        gateway = self._gateway
        key = headers.get(b"idempotency-key")
        retries = headers.get(b"x-stainless-retry-count", b"0")
        retry = retries.isdigit() and bool(retries.strip(b"0"))
        dialect_name = self._dialect.__name__.encode()
        calls: list[ModelCall] = []
        async with RequestReader(session, gateway.turns, gateway.threads) as reader:
            body = await reader.body(receive)
            value = await reader.parse(body, _position(dialect_name, 0))
            policy = reader.choose(gateway.policies.of(value.get("model")).prompts)
            await gateway.turns.wait_for_closed_streams(session, body)
            request = await reader.read(
                value,
                lambda payload: self._dialect.read(payload, session),
                lambda request: request.turn_requests,
            )
            await gateway.turns.wait_for_closed_streams(session, turn_requests=request.turn_requests)
            exempt = (
                exemption_reason(session, value, headers) or untrained_key(gateway, session) or policy.exempt
            )
            try:
                for index, turn_request in enumerate(request.turn_requests):
                    position = _position(dialect_name, index)
                    turn_request = replace(
                        turn_request,
                        digest=await reader.digest(position, body, first=index == 0),
                        idempotency_key=None if key is None else (position + key).decode("latin-1"),
                        exempt=exempt,
                        policy=policy.name,
                        retry=retry,
                    )
                    calls.append(await reader.call(turn_request))
            except BaseException:
                # Calls that were started before the refused one would go on without a listener.
                for call in calls:
                    gateway.turns.on_disconnect(session, call)
                raise
        return request, calls


def _position(dialect: bytes, index: int) -> bytes:
    """Returns the prefix that distinguishes the digests of a body's several replies."""
    return b"%b/%d/" % (dialect, index)


class ResponseWriter:
    """Sends the results of a request's calls; an early disconnect abandons or closes them."""

    def __init__(
        self,
        gateway: Gateway,
        session: GatewaySession,
        dialect: Dialect,
        request: ParsedRequest,
        calls: Sequence[ModelCall],
    ) -> None:
        self._turns, self._journal, self._metrics = gateway.turns, gateway.journal, gateway.metrics
        self._session = session
        self._dialect = dialect
        self._request = request
        self._calls = calls
        policy = gateway.policies.by_name[calls[0].request.policy]
        self._model = ServedModel(policy.model, policy.renderer.token_text, policy.prompts.thought_end)
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
                    await send(response_start(200, _EVENTS, [(b"cache-control", b"no-cache")]))
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
            self._journal.sent(self._session, call.recorded.turn.index)


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


def exemption_reason(
    session: GatewaySession, payload: dict[str, Any], headers: dict[bytes, bytes]
) -> str | None:
    """Returns the reason that a turn is not trained on, or None; the header overrides the model name."""
    value = headers.get(TRAIN_HEADER)
    if value is not None:
        if value.lower() not in (b"yes", b"no"):
            name = TRAIN_HEADER.decode()
            raise ApiError(f"{name}: {value.decode('latin-1')!r} is neither yes nor no"[:300], param=name)
        return f"header {TRAIN_HEADER.decode()}: no" if value.lower() == b"no" else None
    model = payload.get("model")
    return f"model name {model!r}" if model in session.untrained_models else None


def untrained_key(gateway: Gateway, session: GatewaySession) -> str | None:
    """Returns the reason that a client's calls are not trained on, or None; no header overrides it.

    Calls of a key that was revoked since, or while the keys cannot be read, are not trained on either.
    """
    if session.client is None:
        return None
    key = gateway.keys.named(session.client)
    if key is None:
        return f"key {session.client!r}, which is not valid any more"
    return None if key.train else f"key {key.name!r}, which is not trained on"


def _unread(gateway: Gateway, refusal: ApiError) -> ApiError:
    """Returns a refusal as it may be recorded: its text may quote a request that is not redacted, such as
    the name of an unknown field."""
    redaction = gateway.options.redact
    if redaction is None or refusal.code == "redaction_failed":
        return refusal
    return ApiError(redact_text(str(refusal), redaction), status=refusal.status)


def refused(error: GatewayError) -> ApiError:
    """Returns the error of a call that the gateway cannot serve, such as while its journal's disk is full."""
    status = error.status or 400
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return ApiError(str(error), status=status, type=kind, retryable=status >= 500)

"""The data plane: what agents call. Raw ASGI, for it runs once a turn."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

import orjson
from starlette.types import Message as AsgiMessage
from starlette.types import Receive, Scope, Send

from tidegate.gateway.calls import Call
from tidegate.gateway.dialects import chat
from tidegate.gateway.gateway import Gateway
from tidegate.gateway.refusal import Refusal, session_over
from tidegate.gateway.sessions import Session
from tidegate.gateway.turns import digest_of

log = logging.getLogger("tidegate.gateway")
MAX_BODY = 64 * 2**20
_JSON = b"application/json"
_NO_RETRY = (b"x-should-retry", b"false")


class ClientGone(Exception):
    """The client closed the connection before its request was whole."""


class ChatEndpoint:
    """`POST …/chat/completions`."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        session: Session | None = None
        try:
            headers = dict(scope["headers"])
            session = authenticate(self._gateway, scope, headers)
            request = _read(await read_body(receive), headers)
            call = self._gateway.turns.call(session, request.ask)
        except ClientGone:
            return
        except Refusal as refusal:
            await self._refuse(send, refusal)
            return
        except Exception as error:
            log.exception("a request could not be read")
            if session is not None:
                session.gave_up = f"the gateway failed on a request: {error!r}"
            await self._refuse(
                send, Refusal(f"the gateway cannot make sense of this: {type(error).__name__}")
            )
            return
        await self._answer(session, call, request, receive, send)

    async def _answer(
        self, session: Session, call: Call, request: chat.ChatRequest, receive: Receive, send: Send
    ) -> None:
        """Send the reply; a client that leaves before it is there abandons the call."""
        call.listeners += 1
        gone = asyncio.ensure_future(receive())  # the request is read: what comes now is a disconnect
        gone.add_done_callback(lambda _: call.wake())
        delivered = False
        try:
            if request.ask.stream:
                delivered = await self._stream(session, call, request, gone, send)
            else:
                delivered = await self._whole(session, call, request, gone, send)
        finally:
            if not delivered:
                self._gateway.turns.abandon(session, call)
            gone.cancel()

    async def _whole(
        self,
        session: Session,
        call: Call,
        request: chat.ChatRequest,
        gone: asyncio.Future[AsgiMessage],
        send: Send,
    ) -> bool:
        while not call.done and not gone.done():
            await call.news()
        if refusal := _refusal(session, call):
            await self._refuse(send, refusal)
            return False
        if gone.done():
            return False
        body = chat.whole(call, request, self._gateway.model_name, self._gateway.renderer.token_text)
        self._gateway.turns.deliver(session, call)
        await respond(send, 200, body)
        self._gateway.turns.sent(session, call)
        return True

    async def _stream(
        self,
        session: Session,
        call: Call,
        request: chat.ChatRequest,
        gone: asyncio.Future[AsgiMessage],
        send: Send,
    ) -> bool:
        """Server-sent events; the status waits for the first token, so that a refusal can have its own."""
        stream = chat.ChatStream(call, request, self._gateway.model_name)
        sent, started = 0, False
        while True:
            done = call.done
            refusal = _refusal(session, call)
            if refusal is not None and not started:
                await self._refuse(send, refusal)
                return False
            parts = call.reader.parts[sent:]
            data = b"".join(map(stream.part, parts))
            sent += len(parts)
            if not started and (parts or done):
                started = True
                await send(_start(200, stream.content_type, [(b"cache-control", b"no-cache")]))
                data = stream.start() + data
            if refusal is not None:
                self._count(refusal)
                await send({"type": "http.response.body", "body": data + stream.error(refusal)})
                return False
            if gone.done():
                return False
            if done:
                self._gateway.turns.deliver(session, call)
                await send({"type": "http.response.body", "body": data + stream.end()})
                self._gateway.turns.sent(session, call)
                return True
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            else:
                await call.news()

    async def _refuse(self, send: Send, refusal: Refusal) -> None:
        self._count(refusal)
        headers = [] if refusal.retryable else [_NO_RETRY]
        await respond(send, refusal.status, chat.error_body(refusal), headers)

    def _count(self, refusal: Refusal) -> None:
        self._gateway.metrics.refusals[refusal.code or refusal.type] += 1


class ModelsEndpoint:
    """`GET …/models`."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            authenticate(self._gateway, scope, dict(scope["headers"]))
        except Refusal as refusal:
            await respond(send, refusal.status, chat.error_body(refusal), [_NO_RETRY])
            return
        row = {"id": self._gateway.model_name, "object": "model", "created": 0, "owned_by": "tidegate"}
        await respond(send, 200, orjson.dumps({"object": "list", "data": [row]}))


def authenticate(gateway: Gateway, scope: Scope, headers: dict[bytes, bytes]) -> Session:
    """The session that the call's key opens; a path that names another one is refused alike."""
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    token = key.strip().decode("latin-1") if scheme.lower() == b"bearer" else None
    return gateway.sessions.authenticate(token, scope.get("path_params", {}).get("session_id"))


async def read_body(receive: Receive) -> bytes:
    """The whole body; raises Refusal where it is too large, ClientGone where it never ends."""
    message = await receive()
    chunks: list[bytes] = []
    size = 0
    while True:
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size > MAX_BODY:
            raise Refusal(f"the body is larger than {MAX_BODY} bytes", status=413)
        if not message.get("more_body"):
            return chunk if not chunks else b"".join((*chunks, chunk))
        chunks.append(chunk)
        message = await receive()


def _read(body: bytes, headers: dict[bytes, bytes]) -> chat.ChatRequest:
    try:
        payload = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Refusal(f"the body is not JSON: {error}") from None
    key = headers.get(b"idempotency-key")
    retries = headers.get(b"x-stainless-retry-count", b"0")
    retry = retries.isdigit() and int(retries) >= 1
    return chat.read_request(payload, digest_of(body), key.decode("latin-1") if key else None, retry)


def _refusal(session: Session, call: Call) -> Refusal | None:
    if call.refusal is not None:
        return call.refusal
    # The session ended between the reply and its delivery: what is recorded must not change any more.
    if call.done and session.closed is not None and not (call.node and call.node.turn.delivered):
        return session_over(session.closed)
    return None


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
    content_type: bytes = _JSON,
) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send(_start(status, content_type, [length, *headers]))
    await send({"type": "http.response.body", "body": body})

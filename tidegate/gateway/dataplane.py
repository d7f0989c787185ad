"""The data plane: what agents call. Raw ASGI, for it runs once a turn."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from tidegate.gateway.ask import digest_of
from tidegate.gateway.calls import Call
from tidegate.gateway.dialects import chat, messages
from tidegate.gateway.dialects.base import Dialect, Request, ServedModel
from tidegate.gateway.exchange import Exchange, refuse, respond
from tidegate.gateway.gateway import Gateway
from tidegate.gateway.refusal import Refusal
from tidegate.gateway.sessions import Session

log = logging.getLogger("tidegate.gateway")
MAX_BODY = 64 * 2**20
_MANY_BRACKETS = 200
_HEADROOM = 32  # levels that a reply or a prompt may put around what came


class ClientGone(Exception):
    """The client closed the connection before its request was whole."""


class Endpoint:
    """What makes turns in one dialect: `POST …/chat/completions` and its like."""

    def __init__(self, gateway: Gateway, dialect: Dialect) -> None:
        self._gateway = gateway
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway, session = self._gateway, None
        try:
            headers = dict(scope["headers"])
            session = authenticate(gateway, scope, headers)
            body = await read_body(receive)
            request = self._dialect.read(parse(body), session)
            calls = self._calls(session, request, body, headers)
        except ClientGone:
            return
        except Refusal as refusal:
            await refuse(send, self._dialect, refusal, gateway.metrics)
            return
        except Exception as error:  # noqa: BLE001 - logged, told to the client, and held against no agent
            await refuse(send, self._dialect, puzzled(session, error), gateway.metrics)
            return
        model = ServedModel(
            gateway.model_name, gateway.renderer.token_text, gateway.turns.prompts.thought_end
        )
        exchange = Exchange(session, self._dialect, request, calls, gateway.turns, gateway.metrics, model)
        await exchange.run(receive, send)

    def _calls(
        self, session: Session, request: Request, body: bytes, headers: dict[bytes, bytes]
    ) -> list[Call]:
        """The calls that a request is answered with. Each of them can be asked for again by its place in
        the request; where one is refused all are."""
        key = headers.get(b"idempotency-key")
        retries = headers.get(b"x-stainless-retry-count", b"0")
        retry = retries.isdigit() and bool(retries.strip(b"0"))
        kind = self._dialect.__name__.encode()
        calls: list[Call] = []
        try:
            for index, ask in enumerate(request.asks):
                place = b"%s/%d/" % (kind, index)
                ask = replace(
                    ask,
                    digest=digest_of(place + body),
                    idempotency_key=None if key is None else (place + key).decode("latin-1"),
                    retry=retry,
                )
                calls.append(self._gateway.turns.call(session, ask))
        except BaseException:
            for call in calls:
                self._gateway.turns.abandon(session, call)
            raise
        return calls


class CountEndpoint:
    """`POST …/messages/count_tokens`."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway, session = self._gateway, None
        try:
            session = authenticate(gateway, scope, dict(scope["headers"]))
            ask = messages.read_prompt(parse(await read_body(receive)))
            tokens = gateway.turns.count(session, ask)
        except ClientGone:
            return
        except Refusal as refusal:
            await refuse(send, messages, refusal, gateway.metrics)
            return
        except Exception as error:  # noqa: BLE001 - as above
            await refuse(send, messages, puzzled(session, error), gateway.metrics)
            return
        await respond(send, 200, orjson.dumps({"input_tokens": tokens}))


class ModelsEndpoint:
    """`GET …/models`, in Anthropic's shape for clients that name Anthropic's version."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        anthropic = b"anthropic-version" in headers
        try:
            authenticate(self._gateway, scope, headers)
        except Refusal as refusal:
            await refuse(send, messages if anthropic else chat, refusal, self._gateway.metrics)
            return
        name = self._gateway.model_name
        body = messages.models([name]) if anthropic else chat.models([name])
        await respond(send, 200, body)


def authenticate(gateway: Gateway, scope: Scope, headers: dict[bytes, bytes]) -> Session:
    """The session that the call's key opens; a path that names another one is refused alike."""
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() != b"bearer":
        key = headers.get(b"x-api-key", b"")
    token = key.strip().decode("latin-1")
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


def parse(body: bytes) -> dict[str, Any]:
    """A body's JSON; raises Refusal where it is none, or no object."""
    try:
        payload = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Refusal(f"the body is not JSON: {error}") from None
    if not isinstance(payload, dict):
        raise Refusal("the body is not a JSON object")
    if body.count(b"{") + body.count(b"[") > _MANY_BRACKETS:
        _check_depth(payload)
    return payload


def _check_depth(payload: dict[str, Any]) -> None:
    """Raises Refusal for what is nested so deeply that it could be read but not be written again."""
    nested: Any = payload
    for _ in range(_HEADROOM):
        nested = [nested]
    try:
        orjson.dumps(nested)
    except orjson.JSONEncodeError:
        raise Refusal("the body is nested too deeply: more than two hundred levels") from None


def puzzled(session: Session | None, error: Exception) -> Refusal:
    """A request on which the gateway itself failed: that is not the agent's fault."""
    log.error("a request could not be read", exc_info=error)
    if session is not None:
        session.gave_up = f"the gateway failed on a request: {error!r}"
    return Refusal(f"the gateway cannot make sense of this: {type(error).__name__}")

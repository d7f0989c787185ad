"""What the endpoints share: keys, request bodies, responses, and plain JSON."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

import orjson
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from tidegate.errors import GatewayError
from tidegate.gateway.dialects.base import Dialect
from tidegate.gateway.errors import ApiError, wrong_project_key
from tidegate.gateway.gateway import Gateway
from tidegate.gateway.metrics import GatewayMetrics
from tidegate.gateway.sessions.model_calls import RawBody
from tidegate.gateway.sessions.session import GatewaySession
from tidegate.gateway.turns.redaction import redact_body
from tidegate.gateway.turns.request_reader import LARGE, ClientGone

log = logging.getLogger("tidegate.gateway")
T = TypeVar("T")
Handler = Callable[[Gateway, Scope, Receive, Send], Awaitable[None]]
_NO_RETRY = (b"x-should-retry", b"false")


def authenticate(gateway: Gateway, scope: Scope, headers: dict[bytes, bytes]) -> GatewaySession:
    """Returns the session of a call's key. Raises ApiError, also if the path names another session."""
    session_id = _session_id(scope)
    try:
        return gateway.sessions.authenticate(_key(headers), session_id)
    except ApiError:
        if session_id is None and gateway.keys.required:
            raise wrong_project_key() from None
        raise


def client_name(gateway: Gateway, scope: Scope, headers: dict[bytes, bytes]) -> str | None:
    """Returns the name of a call's project key; None for other keys, and for paths that name a session."""
    return None if _session_id(scope) is not None else gateway.keys.name_of(_key(headers))


def _session_id(scope: Scope) -> str | None:
    session_id: str | None = scope.get("path_params", {}).get("session_id")
    return session_id


def _key(headers: dict[bytes, bytes]) -> str:
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    # Anthropic's clients send `x-api-key`.
    if scheme.lower() != b"bearer":
        key = headers.get(b"x-api-key", b"")
    return key.strip().decode("latin-1")


def bearer_key(scope: Scope) -> str:
    """Returns the key of a request's `Authorization: Bearer KEY`; empty without one."""
    scheme, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
    return key.strip().decode("latin-1") if scheme.lower() == b"bearer" else ""


async def redacted(gateway: Gateway, body: RawBody) -> RawBody:
    """Returns a request body as `gateway.redact` leaves it. Raises ApiError."""
    redaction = gateway.options.redact
    if redaction is None:
        return body
    return await gateway.threads.run(len(body) > LARGE, redact_body, body, redaction)


def internal_error(session: GatewaySession | None, error: Exception) -> ApiError:
    """Returns the error for a failure of the gateway itself, which is not counted against the agent."""
    log.error("internal error while handling a request", exc_info=error)
    if session is not None:
        session.engine_error = f"internal gateway error: {error!r}"
    return ApiError(
        f"internal gateway error while handling the request ({type(error).__name__}); see the gateway log"
    )


class JsonEndpoint:
    """A handler whose errors become responses."""

    def __init__(self, gateway: Gateway, handler: Handler) -> None:
        self._gateway = gateway
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._handler(self._gateway, scope, receive, send)
        except ClientGone:
            return
        except asyncio.CancelledError:  # the server stops, and does not wait for long polls
            await error_response("the gateway stops", 503)(scope, receive, send)
        except (GatewayError, ApiError) as refusal:
            await error_response(str(refusal), refusal.status or 400)(scope, receive, send)


def replay(body: RawBody, receive: Receive) -> Receive:
    """Returns a receive function that replays a body that was read."""
    messages: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

    async def replayed() -> Message:
        return messages.pop() if messages else await receive()

    return replayed


def count(metrics: GatewayMetrics, refusal: ApiError) -> None:
    metrics.refusals[refusal.code or refusal.type] += 1


async def refuse(send: Send, dialect: Dialect, refusal: ApiError, metrics: GatewayMetrics) -> None:
    """Sends an error in the dialect's format."""
    count(metrics, refusal)
    headers = [] if refusal.retryable else [_NO_RETRY]
    await respond(send, refusal.status, dialect.error(refusal), headers)


def response_start(
    status: int, content_type: bytes, headers: Iterable[tuple[bytes, bytes]]
) -> dict[str, Any]:
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
) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send(response_start(status, b"application/json", [length, *headers]))
    await send({"type": "http.response.body", "body": body})

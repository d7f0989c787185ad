"""Endpoint of routes that bypass FastAPI and speak plain JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.types import Receive, Scope, Send

from tidegate.errors import GatewayError
from tidegate.gateway.errors import ApiError
from tidegate.gateway.gateway import Gateway
from tidegate.gateway.http.response import error_response
from tidegate.gateway.turns.request_reader import ClientGone

Handler = Callable[[Gateway, Scope, Receive, Send], Awaitable[None]]


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


def bearer_key(scope: Scope) -> str:
    """Returns the key of a request's `Authorization: Bearer KEY`; empty without one."""
    scheme, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
    return key.strip().decode("latin-1") if scheme.lower() == b"bearer" else ""

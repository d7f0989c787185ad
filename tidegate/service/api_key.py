"""Reads the keys of servers, and checks them in `Authorization: Bearer …`."""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Callable
from functools import cache

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tidegate.errors import ConfigError

ENV_KEY = "TIDEGATE_ENV_KEY"
"""Environment variable with the key of an environment service."""
ENGINE_KEY = "TIDEGATE_ENGINE_KEY"
"""Environment variable with the key of engines."""
OPEN = "/health"
"""Path of a server with a key that needs none."""


def key_from_environment(name: str) -> str | None:
    """Returns the key in an environment variable and removes it, so that child processes do not inherit it.

    Returns:
        The key without surrounding spaces; None if the variable is not set.

    Raises:
        ConfigError: The variable is empty: a request with an empty key would pass.
    """
    key = os.environ.pop(name, None)
    if key is not None and not key.strip():
        raise ConfigError(
            f"the environment variable {name} is empty, and is no key: set it to a secret, or unset it"
        )
    return None if key is None else key.strip()


@cache
def given_engine_key() -> str | None:
    """Returns the environment's key of engines, which it removes. Raises ConfigError if the key is empty."""
    return key_from_environment(ENGINE_KEY)


@cache
def engine_key() -> str:
    """Returns the key of the engines that this process starts or calls: the environment's, or a random one.

    Raises ConfigError if the environment's is empty.
    """
    return given_engine_key() or secrets.token_urlsafe(24)


class ApiKey:
    """FastAPI dependency that refuses calls without the server's key; without a key all calls pass.

    `refusal` creates the exception to raise. An empty key, which any caller could send, raises ConfigError.
    """

    def __init__(self, key: str | None, refusal: Callable[[], Exception]) -> None:
        if key is not None and not key.strip():
            raise ConfigError("the server's key is empty: give a secret, or none for a server on loopback")
        self._key = key
        self._refusal = refusal

    async def __call__(self, request: Request) -> None:
        self.check(request.headers.get("authorization", ""))

    def check(self, authorization: str) -> None:
        """Check the text of an Authorization header, in constant time."""
        if self._key is None:
            return
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode(), self._key.encode()):
            raise self._refusal()


class NeedsKey:
    """ASGI app that passes the calls with a server's key, and those of its health, to another app."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = ApiKey(key, PermissionError)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != OPEN:
            try:
                self._key.check(dict(scope["headers"]).get(b"authorization", b"").decode("latin-1"))
            except PermissionError:
                why = f"this engine needs its key (Authorization: Bearer KEY), the value of {ENGINE_KEY}"
                body = orjson.dumps({"error": {"message": why}})
                await Response(body, 401, media_type="application/json")(scope, receive, send)
                return
        await self._app(scope, receive, send)

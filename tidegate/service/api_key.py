"""Reads a server's API key, and checks it in `Authorization: Bearer …`."""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable

from starlette.requests import Request

from tidegate.errors import ConfigError

ENV_KEY = "TIDEGATE_ENV_KEY"
"""Environment variable with the key of an environment service."""


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

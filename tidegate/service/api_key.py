"""Checks a server's API key in `Authorization: Bearer …`."""

from __future__ import annotations

import hmac
from collections.abc import Callable

from starlette.requests import Request

ENV_KEY = "TIDEGATE_ENV_KEY"
"""Environment variable with the key of an environment service."""


class ApiKey:
    """FastAPI dependency that refuses calls without the server's key; without a key all calls pass.

    `refusal` creates the exception to raise.
    """

    def __init__(self, key: str | None, refusal: Callable[[], Exception]) -> None:
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

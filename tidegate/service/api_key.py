"""A server's own key, which callers carry as `Authorization: Bearer …`."""

from __future__ import annotations

import hmac
from collections.abc import Callable

from starlette.requests import Request


class ApiKey:
    """Lets a call pass that carries the key, or any call where there is none. A FastAPI dependency.

    `refusal` makes what is raised for any other call.
    """

    def __init__(self, key: str | None, refusal: Callable[[], Exception]) -> None:
        self._key = key
        self._refusal = refusal

    async def __call__(self, request: Request) -> None:
        self.check(request.headers.get("authorization", ""))

    def check(self, authorization: str) -> None:
        """`authorization` is the header's text; compared in a time that tells nothing of the key."""
        if self._key is None:
            return
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode(), self._key.encode()):
            raise self._refusal()

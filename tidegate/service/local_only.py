"""Keeps web pages from servers without a key: any page in a browser on this machine can send them requests.

A page of another site can send requests whose content type needs no permission (CORS), and one that has its
own host name point to this machine (DNS rebinding) can read the replies too.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit

import orjson
from starlette.types import ASGIApp, Receive, Scope, Send

SIMPLE = (b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data")
"""Content types that a browser sends to other sites without asking them."""
Refusal = tuple[int, str]


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


class LocalOnly:
    """Refuses the requests that only web pages send; all others reach the app.

    Args:
        app: The ASGI app of a server without a key.
        on_loopback: Whether it listens on loopback alone, so that each host name but loopback's is foreign.
    """

    def __init__(self, app: ASGIApp, *, on_loopback: bool) -> None:
        self._app = app
        self._on_loopback = on_loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(dict(scope["headers"])) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
            return
        status, why = refusal
        body = orjson.dumps({"error": {"message": why, "type": "forbidden", "code": status}})
        length = (b"content-length", str(len(body)).encode())
        headers = [(b"content-type", b"application/json"), length]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _refusal(self, headers: Mapping[bytes, bytes]) -> Refusal | None:
        host, origin = headers.get(b"host", b"localhost"), headers.get(b"origin")
        if self._on_loopback and not is_loopback(_host(b"//" + host)):
            return 403, (
                f"host name {host.decode('latin-1')[:200]!r} refused: this server has no key and serves this "
                "machine only; call it at http://127.0.0.1, or give it a key"
            )
        if origin is not None and not is_loopback(_host(origin)):
            return 403, f"origin {origin.decode('latin-1')[:200]!r} refused: this server has no key"
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind in SIMPLE:
            return 415, (
                f"content type {kind.decode()!r} refused, which any web page can send: send Content-Type: "
                "application/json"
            )
        return None


def _host(address: bytes) -> str:
    """Returns the host name of an address; empty if it is invalid or has a user part, which hides it."""
    try:
        return "" if b"@" in address else urlsplit(address.decode("latin-1")).hostname or ""
    except ValueError:
        return ""

"""Splits URLs into the server and the request's target."""

from __future__ import annotations

import base64
from typing import NamedTuple
from urllib.parse import quote, unquote, urlsplit

_PATH_CHARACTERS = "/?%:@!$&'()*+,;=~[]"
"""Those that stand for themselves in a path and its query."""


class Origin(NamedTuple):
    """The server that a URL names."""

    host: str
    port: int
    tls: bool

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"


def parse_url(url: str) -> tuple[Origin, str, bytes]:
    """Splits a URL.

    Returns:
        The origin, the path with its query, and the headers that the URL determines: `host`, and
        `authorization` for a URL with a user name.

    Raises:
        ValueError: It is not a valid HTTP URL.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not an HTTP URL")
    tls = parts.scheme == "https"
    if not parts.hostname.isprintable() or " " in parts.hostname:
        raise ValueError(f"{url!r} has an invalid host name")
    host = parts.hostname if parts.hostname.isascii() else parts.hostname.encode("idna").decode()
    origin = Origin(host, parts.port or (443 if tls else 80), tls)
    path = quote((parts.path or "/") + (f"?{parts.query}" if parts.query else ""), _PATH_CHARACTERS)
    name = f"[{host}]" if ":" in host else host
    headers = f"host: {name}:{parts.port}\r\n" if parts.port else f"host: {name}\r\n"
    if parts.username is not None:
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        headers += f"authorization: Basic {base64.b64encode(login).decode()}\r\n"
    return origin, path, headers.encode()

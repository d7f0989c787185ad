"""Address of this machine as other machines reach it."""

from __future__ import annotations

import contextlib
import socket

WILDCARDS = ("0.0.0.0", "::")
_ROUTE_TARGETS = {socket.AF_INET: ("192.0.2.1", 9), socket.AF_INET6: ("2001:db8::1", 9)}
"""Documentation addresses, used to look up the outgoing route; nothing is sent to them."""


def reachable_address(host: str = "0.0.0.0") -> str:
    """Return the address at which other machines reach a server that listens on `host`.

    For a wildcard address that is the address of the outgoing route, or loopback without a route.
    """
    if host not in WILDCARDS:
        return host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect(_ROUTE_TARGETS[family])
        return str(sock.getsockname()[0])
    return "::1" if ":" in host else "127.0.0.1"

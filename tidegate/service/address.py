"""This machine's own address, as others reach it."""

from __future__ import annotations

import contextlib
import socket

EVERYWHERE = ("0.0.0.0", "::")
_FAR = {socket.AF_INET: ("192.0.2.1", 9), socket.AF_INET6: ("2001:db8::1", 9)}
"""Addresses of documentation: which way out would be taken there is asked, and nothing is sent."""


def own_address(host: str = "0.0.0.0") -> str:
    """Where others reach what listens at `host`: of one that is every address, the address on the way out
    of this machine, and loopback where there is no way out."""
    if host not in EVERYWHERE:
        return host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect(_FAR[family])
        return str(sock.getsockname()[0])
    return "::1" if ":" in host else "127.0.0.1"

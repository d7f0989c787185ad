"""Messages between a sandbox and its owner: a JSON header and bytes, each with its length in front."""

from __future__ import annotations

import json
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

LENGTHS = struct.Struct(">II")
MAX_HEADER = 1 << 20
"""Longest header in bytes; a command and its environment are in it."""
CHUNK = 1 << 16
"""Most bytes that a sandbox sends with one header."""


def encode_frame(header: dict[str, Any], data: bytes = b"") -> bytes:
    """Returns a message as bytes; raises ValueError if its header is too long."""
    text = json.dumps(header).encode()
    if len(text) > MAX_HEADER:
        raise ValueError(f"the command and its environment have {len(text)} bytes; the limit is {MAX_HEADER}")
    return LENGTHS.pack(len(text), len(data)) + text + data


class FrameBuffer:
    """Collects received bytes and returns whole messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, received: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
        self._bytes += received
        while len(self._bytes) >= LENGTHS.size:
            header, data = LENGTHS.unpack_from(self._bytes)
            end = LENGTHS.size + header + data
            if len(self._bytes) < end:
                return
            text = self._bytes[LENGTHS.size : LENGTHS.size + header]
            body = bytes(self._bytes[LENGTHS.size + header : end])
            del self._bytes[:end]
            yield json.loads(text), body

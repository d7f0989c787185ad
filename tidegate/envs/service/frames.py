"""Messages between the environment service and its worker processes: length-prefixed MessagePack."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

from tidegate.service import exact

_LENGTH = struct.Struct("<I")
LIMIT = 1 << 30
"""Largest message in bytes."""


def pack(message: dict[str, Any]) -> bytes:
    """Returns a message with its length before it.

    Raises:
        ValueError: It is larger than LIMIT.
        TypeError: A value cannot be serialised.
    """
    body = exact.pack(message)
    if len(body) > LIMIT:
        raise ValueError(f"a message of {len(body)} bytes is larger than {LIMIT}")
    return _LENGTH.pack(len(body)) + body


async def read(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Returns the next message; None at the end of the stream."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        message: dict[str, Any] = exact.unpack(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return message

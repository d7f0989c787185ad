"""Reads and parses request bodies, with limits on size, time and depth."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from starlette.types import Message, Receive

from tidegate.gateway.errors import ApiError
from tidegate.gateway.nesting import MAX_BODY_LEVELS, too_deep
from tidegate.gateway.request import RawBody
from tidegate.service import exact

MAX_BODY = 64 * 2**20
SMALL_BODY = 2**20
"""Limit of the bodies of routes that need no text of a model."""
HELD_BODIES = MAX_BODY
"""Limit of the bytes of bodies that are read at one time for one project key or session."""
MAX_VALUES = 1_000_000
"""Values in a large body of which nothing else is known."""
BODY_S = 60.0
"""Seconds in which a client must send its body."""
LARGE = 256 * 1024
"""Bytes beyond which a body is parsed in a thread, one at a time per session."""


class ClientGone(Exception):
    """The client disconnected before its request was complete."""


class HeldBodies:
    """Counts the bytes of the bodies that are read at one time, by project key or session.

    So nobody can make the gateway hold as many bodies of MAX_BODY bytes as there are connections.
    """

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()

    @contextlib.contextmanager
    def counted(self, flow: str, receive: Receive) -> Iterator[Receive]:
        """Yields a `receive` whose bytes count against HELD_BODIES until the end of the context.

        Beyond the limit it raises ApiError (429).
        """
        own = 0

        async def counting() -> Message:
            nonlocal own
            message = await receive()
            if size := len(message.get("body", b"")):
                if self._held[flow] + size > HELD_BODIES:
                    raise ApiError(
                        f"bodies of {self._held[flow]} bytes are being read for this key, and the limit is "
                        f"{HELD_BODIES}; send fewer large requests at one time",
                        status=429,
                        type="too_many_large_bodies",
                        code="too_many_large_bodies",
                        retryable=True,
                    )
                own += size
                self._held[flow] += size
            return message

        try:
            yield counting
        finally:
            self._held[flow] -= own
            if not self._held[flow]:
                del self._held[flow]


async def read_body(
    receive: Receive, large: Callable[[], Awaitable[None]] | None = None, *, small: bool = False
) -> RawBody:
    """Reads a complete body; `large` is awaited before more than about LARGE bytes are read.

    With `small`, the limit is SMALL_BODY. Raises ApiError if the body is too large or too slow, ClientGone if
    the client disconnects.
    """
    limit = SMALL_BODY if small else MAX_BODY
    try:
        async with asyncio.timeout(BODY_S) as timeout:
            message = await receive()
            body = bytearray()
            while True:
                if message["type"] == "http.disconnect":
                    raise ClientGone
                chunk: bytes = message.get("body", b"")
                if len(body) + len(chunk) > limit:
                    raise _too_large(limit)
                # The usual body comes in one message, and needs no copy.
                if not message.get("more_body") and not body:
                    return chunk
                body += chunk
                if not message.get("more_body"):
                    return body
                if large is not None and len(body) > LARGE:
                    # The wait for the session's other large requests is not the client's delay.
                    timeout.reschedule(None)
                    await large()
                    timeout.reschedule(asyncio.get_running_loop().time() + BODY_S)
                    large = None
                message = await receive()
    except TimeoutError:
        raise ApiError(
            f"the body did not arrive within {BODY_S:g} s", status=408, type="timeout", retryable=True
        ) from None


def _too_large(limit: int) -> ApiError:
    return ApiError(f"the body is larger than {limit} bytes", status=413)


def parse(body: RawBody) -> dict[str, Any]:
    """Parses a body. Raises ApiError unless it is a JSON object."""
    try:
        payload = exact.loads(body)
    except ValueError as error:
        raise ApiError(f"the body is not JSON: {error}") from None
    if not isinstance(payload, dict):
        raise ApiError("the body is not a JSON object")
    if body.count(b"{") + body.count(b"[") > MAX_BODY_LEVELS and too_deep(payload, MAX_BODY_LEVELS):
        raise ApiError(f"the body is nested more than {MAX_BODY_LEVELS} levels deep; send flatter JSON")
    return payload


def parse_large(body: RawBody, max_values: int = MAX_VALUES) -> dict[str, Any]:
    """Parses a large body, in a thread. Raises as `parse` does, and for more than `max_values` values."""
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Otherwise it has too many values even without what looks like one in a string.
    if bare.count(b'"') <= 4 * max_values:
        bare = b"".join(bare.split(b'"')[::2])  # the text outside of strings
    if sum(map(bare.count, (b",", b"[", b"{"))) > max_values:
        raise ApiError(f"the body has more than {max_values} values; send fewer", status=413)
    return parse(body)

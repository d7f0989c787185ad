"""Reads and parses request bodies, with limits on size, time and depth."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.types import Receive

from tidegate.gateway.errors import ApiError
from tidegate.gateway.large_json import Folded, fold
from tidegate.gateway.nesting import MAX_BODY_LEVELS, too_deep
from tidegate.gateway.request import RawBody
from tidegate.service import exact
from tidegate.service.direct.asgi import DirectReceive

MAX_BODY = 64 * 2**20
BODY_S = 60.0
"""Seconds in which a client must send its body."""
LARGE = 256 * 1024
"""Bytes beyond which a body is parsed in a thread, one at a time per session."""


class ClientGone(Exception):
    """The client disconnected before its request was complete."""


async def read_body(receive: Receive, large: Callable[[], Awaitable[None]] | None = None) -> RawBody:
    """Reads a complete body; `large` is awaited before more than about LARGE bytes are read. Raises ApiError
    if the body is too large or too slow, ClientGone if the client disconnects."""
    if isinstance(receive, DirectReceive) and (complete := receive.take()) is not None:
        if len(complete) > MAX_BODY:
            raise _too_large()
        return complete
    try:
        async with asyncio.timeout(BODY_S) as timeout:
            message = await receive()
            body = bytearray()
            while True:
                if message["type"] == "http.disconnect":
                    raise ClientGone
                chunk: bytes = message.get("body", b"")
                if len(body) + len(chunk) > MAX_BODY:
                    raise _too_large()
                if not message.get("more_body") and not body:
                    return chunk
                body += chunk
                if not message.get("more_body"):
                    return body
                if large is not None and len(body) > LARGE:
                    timeout.reschedule(None)
                    await large()
                    timeout.reschedule(asyncio.get_running_loop().time() + BODY_S)
                    large = None
                message = await receive()
    except TimeoutError:
        raise ApiError(
            f"the body did not arrive within {BODY_S:g} s", status=408, type="timeout", retryable=True
        ) from None


def _too_large() -> ApiError:
    return ApiError(f"the body is larger than {MAX_BODY} bytes", status=413)


def parse(body: RawBody) -> dict[str, Any]:
    """Parses a body. Raises ApiError unless it is a JSON object."""
    try:
        payload = exact.loads(body)
    except ValueError as error:
        raise ApiError(f"the body is not JSON: {error}") from None
    brackets = body.count(b"{") + body.count(b"[")
    return _checked(payload, brackets > MAX_BODY_LEVELS)


def parse_large(body: RawBody, max_values: int) -> Folded:
    """Parses a large body, in a thread, with long strings folded. Raises as `parse` does."""
    folded = fold(body, max_values)
    _checked(folded.value, True)
    return folded


def _checked(payload: Any, check_depth: bool) -> dict[str, Any]:
    if not isinstance(payload, dict):
        raise ApiError("the body is not a JSON object")
    if check_depth and too_deep(payload, MAX_BODY_LEVELS):
        raise ApiError(f"the body is nested more than {MAX_BODY_LEVELS} levels deep; send flatter JSON")
    return payload

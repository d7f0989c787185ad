"""Bodies of requests: read with a bound and a deadline, and understood as JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.types import Receive

from tidegate.gateway.errors import ApiError
from tidegate.gateway.large_json import Folded, fold
from tidegate.gateway.nesting import MOST_BODY_LEVELS, too_deep
from tidegate.gateway.request import RawBody

MAX_BODY = 64 * 2**20
BODY_S = 60.0
"""How long a client may take to send a body."""
LARGE = 256 * 1024
"""Bytes of a body beyond which it is understood in a thread, one at a time of a session."""


class ClientGone(Exception):
    """The client closed the connection before its request was whole."""


async def read_body(receive: Receive, large: Callable[[], Awaitable[None]] | None = None) -> RawBody:
    """The whole body; `large` is awaited before more than LARGE bytes of it are taken.

    Raises Refusal where it is too large or too slow, ClientGone where it never ends.
    """
    try:
        async with asyncio.timeout(BODY_S) as timeout:
            message = await receive()
            whole = bytearray()
            while True:
                if message["type"] == "http.disconnect":
                    raise ClientGone
                chunk: bytes = message.get("body", b"")
                if len(whole) + len(chunk) > MAX_BODY:
                    raise ApiError(f"the body is larger than {MAX_BODY} bytes", status=413)
                if not message.get("more_body") and not whole:
                    return chunk
                whole += chunk
                if not message.get("more_body"):
                    return whole
                if large is not None and len(whole) > LARGE:
                    timeout.reschedule(None)
                    await large()
                    timeout.reschedule(asyncio.get_running_loop().time() + BODY_S)
                    large = None
                message = await receive()
    except TimeoutError:
        raise ApiError(
            f"the body did not arrive within {BODY_S:g} s", status=408, type="timeout", retryable=True
        ) from None


def parse(body: RawBody) -> dict[str, Any]:
    """A body's JSON; raises Refusal where it is none, or no object."""
    try:
        payload = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(f"the body is not JSON: {error}") from None
    brackets = body.count(b"{") + body.count(b"[")
    return _checked(payload, brackets > MOST_BODY_LEVELS)


def parse_large(body: RawBody, most_values: int) -> Folded:
    """The same of a large body, in a thread: its long strings are left folded."""
    folded = fold(body, most_values)
    _checked(folded.value, True)
    return folded


def _checked(payload: Any, may_be_deep: bool) -> dict[str, Any]:
    if not isinstance(payload, dict):
        raise ApiError("the body is not a JSON object")
    if may_be_deep and too_deep(payload, MOST_BODY_LEVELS):
        raise ApiError(f"the body is nested more than {MOST_BODY_LEVELS} levels deep; send flatter JSON")
    return payload

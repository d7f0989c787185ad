"""JSON in and out of the engine's routes."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from tidegate.engine.checks import RequestError


def json_reply(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


def error_reply(message: str, status: int) -> Response:
    return json_reply({"error": {"message": message}}, status)


def done(message: str, **more: Any) -> Response:
    return json_reply({"success": True, "message": message, **more})


def refused(message: str) -> Response:
    return json_reply({"success": False, "message": message}, 400)


async def read_body(request: Request) -> dict[str, Any]:
    """Raises RequestError where it is not a JSON object, ClientDisconnect where it does not come."""
    raw = await request.body()
    try:
        body = orjson.loads(raw) if raw.strip() else {}
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError("the body is not a JSON object")
    return body

"""HTTP helpers of SGLang's protocol: routes, JSON bodies, events and error replies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import wraps
from typing import Any, TypeAlias, TypeVar

import orjson
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from tidegate.engine.validation import RequestError
from tidegate.errors import EngineError

Served = TypeVar("Served")
Handler: TypeAlias = Callable[[Served, Request], Awaitable[Response]]
Routes: TypeAlias = Sequence[tuple[str, str, Handler[Served]]]
"""Method, path and handler of each route."""


def protocol_app(
    served: Served,
    name: str,
    routes: Routes[Served],
    lifespan: Callable[[Starlette], AbstractAsyncContextManager[None]],
) -> Starlette:
    """Returns an ASGI app that passes `served` to its handlers; `name` is the server's name in 404 errors."""

    async def no_such_route(request: Request, _: Exception) -> Response:
        return error_reply(f"{name} has no {request.method} {request.url.path}", 404)

    return Starlette(
        routes=[_route(served, *route) for route in routes],
        lifespan=lifespan,
        exception_handlers={404: no_such_route, 405: no_such_route},
    )


def _route(served: Served, method: str, path: str, handler: Handler[Served]) -> Route:
    @wraps(handler)
    async def endpoint(request: Request) -> Response:
        try:
            return await handler(served, request)
        except RequestError as error:
            return error_reply(str(error), 400)
        except EngineError as error:
            return error_reply(str(error), 503)
        except ClientDisconnect:
            return Response(status_code=499)

    return Route(path, endpoint, methods=[method])


def json_reply(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


def error_reply(message: str, status: int) -> Response:
    return json_reply({"error": {"message": message}}, status)


def done(message: str, **more: Any) -> Response:
    return json_reply({"success": True, "message": message, **more})


def refused(message: str) -> Response:
    return json_reply({"success": False, "message": message}, 400)


async def read_body(request: Request) -> dict[str, Any]:
    """Returns the body's JSON object. Raises RequestError if it is none, ClientDisconnect."""
    raw = await request.body()
    try:
        body = orjson.loads(raw) if raw.strip() else {}
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError("the body is not a JSON object")
    return body


async def disconnected(request: Request) -> None:
    """Returns when the client has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def event(value: Any) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"

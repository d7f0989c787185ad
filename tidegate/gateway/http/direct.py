"""Routes that bypass ASGI and FastAPI: those of each turn and of each episode.

A request that one of them would refuse is left to ASGI, which has the same routes and the errors' formats.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

import orjson
from pydantic import TypeAdapter, ValidationError
from starlette.types import ASGIApp

from tidegate.errors import GatewayError
from tidegate.gateway.errors import ApiError
from tidegate.gateway.gateway import Gateway
from tidegate.gateway.http import attempts, schemas
from tidegate.gateway.http.response import error_response
from tidegate.gateway.sessions.session import SessionRequest
from tidegate.service.api_key import ApiKey
from tidegate.service.direct.asgi import serve_endpoint
from tidegate.service.direct.request import DirectRequest, DirectRoute
from tidegate.types import Trajectory

Answer = tuple[int, dict[str, Any]]
"""Status and JSON body of a response."""
Read = Callable[[DirectRequest], Coroutine[Any, Any, Answer] | None]
"""Returns the job that answers a request; None for one that only ASGI can answer. Raises ValidationError."""
_SESSION = TypeAdapter(SessionRequest)
_WAIT = re.compile(rb"wait_s=(\d{1,3}(?:\.\d+)?)")
_MAX_WAIT_S = 600.0


def routes(gateway: Gateway, dialects: Mapping[str, ASGIApp]) -> dict[bytes, DirectRoute]:
    """Returns the routes by request line; `dialects` are the endpoints by path after `/v1`."""
    found: dict[str, DirectRoute] = {
        "POST /attempts/next": partial(attempts.poll, gateway),
        "POST /attempts/{}/heartbeat": partial(serve_endpoint, attempts.heartbeat_endpoint(gateway)),
        "POST /s/{}/finish": partial(serve_endpoint, attempts.finish_endpoint(gateway)),
    }
    control: dict[str, Read] = {
        "POST /sessions": partial(_open, gateway),
        "POST /sessions/{}/finish": partial(_finish, gateway),
        "GET /sessions/{}/result": partial(_result, gateway),
    }
    found |= {line: partial(_serve, admin_key(gateway), read) for line, read in control.items()}
    for path, endpoint in dialects.items():
        for base in ("/s/{}/v1", "/v1"):
            found[f"POST {base}{path}"] = partial(serve_endpoint, endpoint)
    return {f"{line} HTTP/1.1".encode(): route for line, route in found.items()}


def admin_key(gateway: Gateway) -> ApiKey:
    """Returns the check of the control plane's key."""
    return ApiKey(
        gateway.options.admin_key,
        lambda: GatewayError("this route needs the gateway's admin key", status=401),
    )


def _serve(admin: ApiKey, read: Read, request: DirectRequest) -> bool:
    """Serves a call of the control plane."""
    try:
        admin.check(request.headers.get(b"authorization", b"").decode("latin-1"))
        if request.body and request.headers.get(b"content-type", b"").lower() != b"application/json":
            return False
        job = read(request)
    except (GatewayError, ValidationError):
        return False
    if job is None:
        return False
    request.completes = True
    request.start(_answer(request, job), cancels=False)
    return True


async def _answer(request: DirectRequest, job: Coroutine[Any, Any, Answer]) -> None:
    try:
        status, row = await job
    except (GatewayError, ApiError) as refusal:
        response = error_response(str(refusal), refusal.status or 400)
        request.respond(response.status_code, bytes(response.body), response.raw_headers)
        return
    request.respond(status, orjson.dumps(row))


def _open(gateway: Gateway, request: DirectRequest) -> Coroutine[Any, Any, Answer]:
    body = _SESSION.validate_json(request.body)
    root = gateway.options.public_url or f"http://{request.headers[b'host'].decode('latin-1')}"

    async def open_session() -> Answer:
        session, key = await gateway.open_session(body)
        return 200, schemas.access_row(session.id, key, root)

    return open_session()


def _finish(gateway: Gateway, request: DirectRequest) -> Coroutine[Any, Any, Answer]:
    body, session_id = schemas.read(schemas.Finish, request.body), request.parameter
    report = body.report()

    async def finish() -> Answer:
        trajectory = await gateway.finish(session_id, report, body.trainer_epoch, body.wait_s)
        return _outcome(gateway, session_id, trajectory)

    return finish()


def _result(gateway: Gateway, request: DirectRequest) -> Coroutine[Any, Any, Answer] | None:
    wait, session_id = _WAIT.fullmatch(request.query), request.parameter
    if wait is None or (wait_s := float(wait[1])) > _MAX_WAIT_S:
        return None

    async def result() -> Answer:
        return _outcome(gateway, session_id, await gateway.result(session_id, wait_s))

    return result()


def _outcome(gateway: Gateway, session_id: str, trajectory: Trajectory | None) -> Answer:
    if trajectory is None:
        return 202, {"session_id": session_id, "state": gateway.session(session_id).state}
    return 200, schemas.summary_row(trajectory)

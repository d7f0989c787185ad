"""Serves the calls of workers and of a trainer's own agents."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tidegate.errors import GatewayError
from tidegate.gateway.clients.protection import check_reward
from tidegate.gateway.errors import ApiError
from tidegate.gateway.gateway import Gateway
from tidegate.gateway.http import schemas
from tidegate.gateway.http.base import JsonEndpoint, bearer_key, respond, unless_disconnected
from tidegate.gateway.ids import agents_key, api_key_of
from tidegate.gateway.sessions.session import GatewaySession
from tidegate.gateway.turns.redaction import redact_text
from tidegate.gateway.turns.request_reader import read_body
from tidegate.service import exact

ACCEPT_S = 10.0
"""Seconds for which the response to `finish` waits for the reward."""


def routes(gateway: Gateway) -> list[Route]:
    """Returns the routes that a worker key opens."""
    return [
        Route("/attempts/next", JsonEndpoint(gateway, _next), methods=["POST"]),
        Route("/attempts/{session_id}/heartbeat", JsonEndpoint(gateway, _heartbeat), methods=["POST"]),
        Route("/attempts/leave", JsonEndpoint(gateway, _leave), methods=["POST"]),
    ]


def finish_route(gateway: Gateway) -> Route:
    """Returns the route by which an attempt or a client's episode is finished, with its finish key."""
    return Route("/s/{session_id}/finish", JsonEndpoint(gateway, _finish), methods=["POST"])


async def _next(gateway: Gateway, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with attempts; they are queued again if the client disconnects before."""
    own = _is_own(gateway, bearer_key(scope))
    poll = schemas.read(schemas.NextAttempts, await read_body(receive, small=True))
    gateway.attempts.claim(poll.worker, poll.secret, own=own)
    taking = gateway.attempts.take(poll.worker, poll.capacity, poll.wait_s, own=own)
    taken = await unless_disconnected(receive, taking, gateway.attempts.give_back)
    if taken is not None:
        root = "" if not taken else gateway.options.public_url or str(Request(scope).base_url).rstrip("/")
        await respond(send, 200, _answer(gateway, poll.worker, taken, root))


def _answer(gateway: Gateway, worker: str, taken: Sequence[tuple[GatewaySession, str]], root: str) -> bytes:
    return exact.dumps(
        {
            "attempts": [_row(gateway, session, key, root) for session, key in taken],
            "ended": gateway.attempts.stopped(worker),
            "shards": gateway.options.pool.shards,
        }
    )


async def _heartbeat(gateway: Gateway, scope: Scope, receive: Receive, send: Send) -> None:
    own = _is_own(gateway, bearer_key(scope))
    body = schemas.read(schemas.WorkerName, await read_body(receive, small=True))
    gateway.attempts.claim(body.worker, body.secret, own=own)
    gateway.attempts.heartbeat(scope["path_params"]["session_id"], body.worker)
    await respond(send, 200, b"{}")


async def _leave(gateway: Gateway, scope: Scope, receive: Receive, send: Send) -> None:
    own = _is_own(gateway, bearer_key(scope))
    body = schemas.read(schemas.WorkerName, await read_body(receive, small=True))
    gateway.attempts.claim(body.worker, body.secret, own=own)
    await respond(send, 200, exact.dumps(gateway.attempts.leave(body.worker)))


async def _finish(gateway: Gateway, scope: Scope, receive: Receive, send: Send) -> None:
    session = _to_finish(gateway, scope)
    with gateway.bodies.counted(session.affinity.flow, receive) as counted:
        body = await read_body(counted)
    report = schemas.read(schemas.WorkerFinish, body)
    if session.ending is not None and session.ending.imposed:
        raise GatewayError(f"the episode has ended: {session.ending.error}", status=410)
    if session.client is not None:
        check_reward(report.reward, gateway.options.reward_range)
    if (redaction := gateway.options.redact) is not None:
        report.output = report.output and redact_text(report.output, redaction)
        report.error = report.error and redact_text(report.error, redaction)
    if report.outcome is None:
        gateway.attempts.count(session)
    trajectory = await gateway.finish(session.id, report.report(), wait_s=ACCEPT_S)
    row: dict[str, object] = {"state": session.state}
    if trajectory is not None:
        row |= {"outcome": trajectory.outcome.value, "error": trajectory.error}
    await respond(send, 202 if trajectory is None else 200, exact.dumps(row))


def _to_finish(gateway: Gateway, scope: Scope) -> GatewaySession:
    """Returns the session of a finish key. An API key finishes nothing: programs have it, which could discard
    the episodes that they lose. Raises ApiError or GatewayError."""
    session_id, key = str(scope["path_params"]["session_id"]), bearer_key(scope)
    try:
        return gateway.sessions.authenticate(api_key_of(key, gateway.options.id_prefix), session_id)
    except ApiError:
        session = gateway.sessions.authenticate(key, session_id)  # raises unless it is the API key
    if session.offer_heartbeat_s is None and session.client is None:
        raise GatewayError("this session is finished by the process that opened it", status=403)
    raise GatewayError(
        "an episode's api_key cannot finish it: send the finish_key that came with it", status=403
    )


def _is_own(gateway: Gateway, key: str) -> bool:
    """Returns whether the caller runs the trainer's own agents. Raises GatewayError without a valid key."""
    options = gateway.options
    # First, as the trainer's own agents need no worker key to be set.
    if hmac.compare_digest(key.encode(), agents_key(options.admin_key).encode()):
        return True
    if options.worker_key is None:
        raise GatewayError("this gateway takes no workers: it has no worker key", status=403)
    if not hmac.compare_digest(key.encode(), options.worker_key.encode()):
        raise GatewayError("this route needs the gateway's worker key", status=401)
    return False


def _row(gateway: Gateway, session: GatewaySession, finish_key: str, root: str) -> dict[str, object]:
    assert session.task is not None, "an offered session has a task"
    url = f"{root}/s/{session.id}"
    return {
        "attempt": session.id,
        "task": {"id": session.task.id, "messages": session.task.messages},
        "base_url": f"{url}/v1",
        "tools_url": f"{url}/tools",
        "mcp_url": f"{url}/mcp",
        "api_key": api_key_of(finish_key, gateway.options.id_prefix),
        "finish_key": finish_key,
        "model": gateway.policies.default.model,
        "seed": session.seed,
        "deadline_s": session.deadline_s,
        "heartbeat_s": session.offer_heartbeat_s,
    }

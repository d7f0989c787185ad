"""Serves an episode's tools, and the counterpart of its conversation, to its agent."""

from __future__ import annotations

from starlette.convertors import StringConvertor, register_url_convertor
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tidegate.gateway.gateway import Gateway
from tidegate.gateway.http import schemas
from tidegate.gateway.http.endpoints import authenticate
from tidegate.gateway.http.json_endpoint import JsonEndpoint
from tidegate.gateway.http.response import respond
from tidegate.gateway.turns.request_reader import parse, read_body
from tidegate.service import exact


class _Any(StringConvertor):
    """Matches any text, line ends included."""

    regex = "(?s:.*)"


register_url_convertor("any", _Any())


def routes(gateway: Gateway) -> list[Route]:
    """Returns the routes that a session's key opens beside the model's."""
    base = "/s/{session_id}"
    return [
        Route(f"{base}/tools", JsonEndpoint(gateway, _list), methods=["GET"]),
        # Any path: a name that the policy made up, slashes included, is a tool's error, not a missing route.
        Route(f"{base}/tools/{{name:any}}", JsonEndpoint(gateway, _call), methods=["POST"]),
        Route(f"{base}/respond", JsonEndpoint(gateway, _respond), methods=["POST"]),
    ]


async def _list(gateway: Gateway, scope: Scope, receive: Receive, send: Send) -> None:
    session = authenticate(gateway, scope, dict(scope["headers"]))
    await respond(send, 200, exact.dumps({"tools": list(gateway.environments.tools(session))}))


async def _call(gateway: Gateway, scope: Scope, receive: Receive, send: Send) -> None:
    headers = dict(scope["headers"])
    session = authenticate(gateway, scope, headers)
    arguments = parse(await read_body(receive, small=True) or b"{}")
    name = str(scope["path_params"]["name"])
    result = await gateway.environments.call_tool(session, name, arguments, _idempotency_key(headers))
    await respond(send, 200, exact.dumps({"content": result.content, "error": result.error}))


async def _respond(gateway: Gateway, scope: Scope, receive: Receive, send: Send) -> None:
    headers = dict(scope["headers"])
    session = authenticate(gateway, scope, headers)
    with gateway.bodies.counted(session.affinity.flow, receive) as counted:
        reply = schemas.read(schemas.AgentReply, await read_body(counted)).message
    response = await gateway.environments.respond(session, reply, _idempotency_key(headers))
    await respond(send, 200, exact.dumps({"message": response.message, "done": response.done}))


def _idempotency_key(headers: dict[bytes, bytes]) -> str | None:
    key = headers.get(b"idempotency-key")
    return None if not key else key.decode("latin-1")

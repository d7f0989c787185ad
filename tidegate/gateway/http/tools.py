"""Serves an episode's tools, and the counterpart of its conversation, to its agent.

Tools are also served by the Model Context Protocol: streamable HTTP, stateless, with JSON responses. The
official SDK, which implements the protocol, is imported at the first request, as that takes most of a second.
"""

from __future__ import annotations

import asyncio
import importlib
from typing import TYPE_CHECKING, Any

from starlette.convertors import StringConvertor, register_url_convertor
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tidegate import __version__
from tidegate.errors import GatewayError
from tidegate.gateway.errors import ApiError
from tidegate.gateway.gateway import Gateway
from tidegate.gateway.http import schemas
from tidegate.gateway.http.base import JsonEndpoint, authenticate, replay, respond
from tidegate.gateway.sessions.session import GatewaySession
from tidegate.gateway.turns.request_reader import parse, read_body
from tidegate.service import exact

if TYPE_CHECKING:
    from mcp.server.lowlevel import Server
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

SESSION = "tidegate.session"
"""Name of a request's session in its scope, for MCP."""


class _Any(StringConvertor):
    """Matches any text, line ends included."""

    regex = "(?s:.*)"


register_url_convertor("any", _Any())


def routes(gateway: Gateway, mcp: McpServer) -> list[Route]:
    """Returns the routes that a session's key opens beside the model's."""
    base = "/s/{session_id}"
    return [
        Route(f"{base}/tools", JsonEndpoint(gateway, _list), methods=["GET"]),
        # Any path: a name that the policy made up, slashes included, is a tool's error, not a missing route.
        Route(f"{base}/tools/{{name:any}}", JsonEndpoint(gateway, _call), methods=["POST"]),
        Route(f"{base}/respond", JsonEndpoint(gateway, _respond), methods=["POST"]),
        Route(f"{base}/mcp", JsonEndpoint(gateway, mcp.answer), methods=["GET", "POST", "DELETE"]),
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


class McpServer:
    """The MCP server of one gateway; each request is answered for the session whose key it has."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._starting = asyncio.Lock()
        self._manager: StreamableHTTPSessionManager | None = None
        self._serving: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Ends the requests in progress."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)

    async def answer(self, gateway: Gateway, scope: Scope, receive: Receive, send: Send) -> None:
        session = authenticate(gateway, scope, dict(scope["headers"]))
        if scope["method"] != "POST":
            raise GatewayError("this MCP server is stateless: it answers only POST", status=405)
        if session.closed is not None:
            raise GatewayError(f"this session is over ({session.closed})", status=410)
        body = await read_body(receive, small=True)  # the SDK reads bodies of any size
        manager = await self._started()
        await manager.handle_request({**scope, SESSION: session}, replay(body, receive), send)

    async def _started(self) -> StreamableHTTPSessionManager:
        async with self._starting:
            if self._manager is None or self._serving is None or self._serving.done():
                # In a thread, as the import would block the calls of all sessions.
                await asyncio.to_thread(importlib.import_module, "mcp.server.lowlevel")
                from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

                server = _server(self._gateway)
                self._manager = StreamableHTTPSessionManager(server, json_response=True, stateless=True)
                ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._serving = asyncio.create_task(_serve(self._manager, ready), name="MCP server")
                # Also for the task: if the SDK fails to start, `ready` is never set.
                await asyncio.wait((self._serving, ready), return_when=asyncio.FIRST_COMPLETED)
            return self._manager


async def _serve(manager: StreamableHTTPSessionManager, ready: asyncio.Future[None]) -> None:
    """Owns the tasks of the SDK until it is cancelled."""
    async with manager.run():
        ready.set_result(None)
        await asyncio.Event().wait()


def _server(gateway: Gateway) -> Server[Any]:
    from mcp import MCPError
    from mcp.server.lowlevel import Server
    from mcp.types import (
        INTERNAL_ERROR,
        INVALID_PARAMS,
        CallToolRequestParams,
        CallToolResult,
        ListToolsResult,
        TextContent,
        Tool,
    )

    async def list_tools(context: Any, _: Any) -> ListToolsResult:
        functions = [tool["function"] for tool in gateway.environments.tools(_session(context))]
        return ListToolsResult(
            tools=[
                Tool(name=one["name"], description=one["description"], input_schema=one["parameters"])
                for one in functions
            ]
        )

    async def call_tool(context: Any, call: CallToolRequestParams) -> CallToolResult:
        try:
            result = await gateway.environments.call_tool(
                _session(context), call.name, call.arguments or {}, None
            )
        except (GatewayError, ApiError) as error:
            code = INVALID_PARAMS if error.status in (400, 413) else INTERNAL_ERROR
            raise MCPError(code, str(error)) from error
        return CallToolResult(content=[TextContent(text=result.content)], is_error=result.error)

    return Server("tidegate", version=__version__, on_list_tools=list_tools, on_call_tool=call_tool)


def _session(context: Any) -> GatewaySession:
    session: GatewaySession = context.request.scope[SESSION]
    return session

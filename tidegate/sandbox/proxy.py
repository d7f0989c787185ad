"""Passes the model, tool, MCP and `respond` calls of a sandbox on to one address, and refuses all others."""

from __future__ import annotations

import asyncio
import logging
import re
import socket

import aiohttp
from aiohttp import web
from yarl import URL

log = logging.getLogger("tidegate.sandbox")

HOP_BY_HOP = frozenset({"host", "connection", "keep-alive", "transfer-encoding", "te", "upgrade", "expect"})
ROUTES = re.compile(
    r"v1/((chat/)?completions|responses|messages(/count_tokens)?|models(/.+)?)|tools(/[^/]+)?|mcp|respond"
)
"""Routes for programs. `finish` is not one: a program would decide its own outcome."""
CONNECT_S = 5.0


class PathProxy:
    """A server inside a sandbox that calls one address outside.

    The sandbox has no network: the proxy's socket was bound in the sandbox and handed out, so that the
    owner's process accepts the connections.

    Args:
        url: The address. Requests of `ROUTES` are passed on, below its path and, as a key names its session,
            below `/`.
    """

    def __init__(self, url: str) -> None:
        self._url = URL(url)
        self._bases = {"/", self._url.path.removesuffix("/").removesuffix("/v1") + "/"}

    async def start(self, inside: socket.socket) -> str:
        """Listens on a bound socket, which the proxy then owns; returns the URL inside the sandbox."""
        port = inside.getsockname()[1]
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        connector = aiohttp.TCPConnector(limit=0)
        self._http = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        application = web.Application(client_max_size=0)
        application.router.add_route("*", "/{path:.*}", self._pass_on)
        self._runner = web.AppRunner(
            application, access_log=None, shutdown_timeout=0.0, handler_cancellation=True
        )
        await self._runner.setup()
        await web.SockSite(self._runner, inside, backlog=128).start()
        return str(self._url.with_scheme("http").with_host("127.0.0.1").with_port(port))

    async def close(self) -> None:
        """Closes the server and its connections."""
        await self._runner.cleanup()
        await self._http.close()

    def allows(self, path: str) -> bool:
        """Whether a request's path, as sent, is passed on."""
        plain = path.partition("?")[0]
        if "%" in plain or "\\" in plain or "//" in plain or "/." in plain:
            return False
        return any(
            plain.startswith(base) and ROUTES.fullmatch(plain.removeprefix(base)) for base in self._bases
        )

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        if not self.allows(request.raw_path):
            return _refusal(404, f"this sandbox has no access to {request.raw_path[:200]}")
        url = URL(f"{self._url.origin()}{request.raw_path}", encoded=True)
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP]
        try:
            async with self._http.request(
                request.method,
                url,
                headers=headers,
                data=request.content if request.body_exists else None,
                allow_redirects=False,
                skip_auto_headers=("Accept-Encoding", "User-Agent", "Content-Type", "Accept"),
            ) as answer:
                return await _stream(request, answer)
        except (aiohttp.ClientError, TimeoutError) as error:
            log.warning("sandbox: %s %s: %r", request.method, url.path, error)
            return _refusal(503, "the server cannot be reached; retry later")


async def _stream(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    response = web.StreamResponse(status=answer.status, reason=answer.reason)
    for name, value in answer.headers.items():
        if name.lower() not in HOP_BY_HOP:
            response.headers.add(name, value)
    await response.prepare(request)
    try:
        async for chunk in answer.content.iter_any():
            await response.write(chunk)
    except (aiohttp.ClientError, asyncio.IncompleteReadError) as error:
        log.warning("sandbox: %s %s: the response broke off: %r", request.method, answer.url.path, error)
        if request.transport is not None:
            request.transport.abort()
        raise
    await response.write_eof()
    return response


def _refusal(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "sandbox"}}, status=status)

"""The client of an environment service whose connections break."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest
from aiohttp import web

from tests.http_app import served_app
from tidegate.gateway.environments import client
from tidegate.gateway.environments.base import EpisodeLostError
from tidegate.gateway.environments.client import MOST_BROKEN, EnvironmentClient

WITHIN_S = 0.3


@contextlib.asynccontextmanager
async def responding(
    handle: Callable[[web.Request], Awaitable[web.StreamResponse]],
) -> AsyncIterator[EnvironmentClient]:
    """Serves `handle`; the client repeats a request for WITHIN_S."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    async with served_app(app) as url, EnvironmentClient([url]) as one:
        yield one


async def breaking(request: web.Request, after_s: float) -> web.StreamResponse:
    """Breaks a response off after a while."""
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b"\xc0")
    await asyncio.sleep(after_s)
    assert request.transport is not None
    request.transport.abort()
    return response


async def test_a_service_that_is_lost_after_a_long_time_has_the_time_of_a_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(EnvironmentClient._request, "__defaults__", (WITHIN_S,))
    requests = 0

    async def handle(request: web.Request) -> web.StreamResponse:
        nonlocal requests
        requests += 1
        if requests == 1:
            return await breaking(request, 3 * WITHIN_S)
        return web.Response(body=msgspec.msgpack.encode({"result": {"message": None, "done": True}}))

    async with responding(handle) as env:
        assert (await env.respond("e", {"role": "assistant"})).done
    assert requests == 2


async def test_a_request_that_breaks_every_response_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "LONGEST_S", 0.01)
    requests = 0

    async def handle(request: web.Request) -> web.StreamResponse:
        nonlocal requests
        requests += 1
        return await breaking(request, 0.0)

    async with responding(handle) as env:
        with pytest.raises(EpisodeLostError, match="broke off 6 responses"):
            await env.respond("e", {"role": "assistant"})
    assert requests == MOST_BROKEN + 1

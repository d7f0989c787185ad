"""HTTP server of the environment service, which gateways call.

Bodies are MessagePack. A response that takes long begins with PADDING bytes, one every few seconds, so that a
client can tell a queued reward from a server that hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tidegate.envs.service.pool import NoEpisodeError, PoolSettings, WorkerPool
from tidegate.envs.service.process import CallError, CallTimeoutError, WorkerLostError
from tidegate.errors import ConfigError, RewardError, RewardUnavailableError, TidegateError, UnrewardedError
from tidegate.service import exact
from tidegate.service.api_key import ENV_KEY, ApiKey
from tidegate.service.serve import Listen, bind, run_app

PADDING = b"\xc0"
"""MessagePack's nil."""
PADDING_S = 5.0

_KINDS: dict[type[BaseException], str] = {
    NoEpisodeError: "lost",
    CallError: "lost",
    CallTimeoutError: "timeout",
    WorkerLostError: "lost",
    UnrewardedError: "unrewarded",
    RewardUnavailableError: "unavailable",
    RewardError: "reward",
}
"""Kinds of failures by exception, as clients read them."""


log = logging.getLogger("tidegate.envs.service.server")


class _Unauthorized(Exception):
    pass


def create_app(pool: WorkerPool, key: str | None, failures: list[TidegateError]) -> Starlette:
    """Returns the ASGI app of a pool; its lifespan starts and closes the pool.

    The error of a start that fails is added to `failures`.
    """
    check = ApiKey(key, _Unauthorized)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        try:
            await pool.start()
        except TidegateError as error:
            failures.append(error)
            logging.getLogger("uvicorn.error").disabled = True  # it would print the traceback as well
            raise
        try:
            yield
        finally:
            await pool.close()

    def route(path: str, handle: Callable[[str, Any], Awaitable[Any]], method: str = "POST") -> Route:
        async def endpoint(request: Request) -> Response:
            try:
                await check(request)
            except _Unauthorized:
                return Response("the environment service needs its key", 401)
            try:
                body = exact.unpack(await request.body() or b"\x80")
            except msgspec.DecodeError as error:
                return Response(f"the body is not MessagePack: {error}", 400)
            job = pool.own(handle(request.path_params.get("name", ""), body))
            return StreamingResponse(_padded(job), media_type="application/msgpack")

        return Route(path, endpoint, methods=[method])

    async def about(_: str, __: Any) -> Any:
        return pool.about

    async def setup(name: str, body: Any) -> None:
        await pool.setup(name, body["task"], body["deadline_s"], body["create"])

    async def tool(name: str, body: Any) -> Any:
        return await pool.call(name, "tool", tool=body["name"], arguments=body["arguments"], key=body["key"])

    async def respond(name: str, body: Any) -> Any:
        return await pool.call(name, "respond", reply=body["reply"], key=body["key"])

    async def score(name: str, body: Any) -> Any:
        return await pool.score(name, body["stateful"], body["task"], body["trajectory"])

    async def rank(name: str, body: Any) -> Any:
        return await pool.rank(name, body["task"], body["trajectories"])

    async def teardown(name: str, _: Any) -> None:
        await pool.teardown(name)

    async def health(_: Request) -> Response:
        return Response("ok")

    return Starlette(
        lifespan=lifespan,
        routes=[
            Route("/health", health),
            route("/environments", about, "GET"),
            route("/episodes/{name}", setup, "PUT"),
            route("/episodes/{name}", teardown, "DELETE"),
            route("/episodes/{name}/tool", tool),
            route("/episodes/{name}/respond", respond),
            route("/episodes/{name}/score", score),
            route("/groups/{name}/rank", rank),
        ],
    )


async def _padded(job: asyncio.Future[Any]) -> AsyncIterator[bytes]:
    """Yields padding until a job ends, then its result or failure.

    The job continues if the client disconnects: a client that repeats its request gets the same result.
    """
    while not job.done():
        done, _ = await asyncio.wait((job,), timeout=PADDING_S)
        if not done:
            yield PADDING
    yield exact.pack(_outcome(job))


def _outcome(job: asyncio.Future[Any]) -> dict[str, Any]:
    if job.cancelled():
        return {"error": "the environment service stops", "kind": "lost"}
    error = job.exception()
    if error is None:
        return {"result": job.result()}
    metrics = error.metrics if isinstance(error, RewardError) else {}
    return {
        "error": str(error) or type(error).__name__,
        "kind": _KINDS.get(type(error), "lost"),
        "metrics": metrics,
    }


def serve(settings: PoolSettings, key: str | None, listen: Listen) -> None:
    """Serves environments until a signal stops it.

    Raises:
        ConfigError: The environment cannot be loaded, or it would be reachable from elsewhere without a key.
        StartError: The port is taken, or a worker does not start.
    """
    if not listen.on_loopback and key is None:
        raise ConfigError(
            f"listening on {listen.host} without a key would show the tasks' answers to anyone: set "
            f"{ENV_KEY}, or listen on loopback"
        )
    failures: list[TidegateError] = []
    app = create_app(WorkerPool(settings), key, failures)
    try:
        run_app(app, bind(listen), listen, keyless=key is None)
    finally:  # uvicorn exits if the pool does not start
        if failures:
            raise failures[0] from None

"""The embedded engine as a process that speaks SGLang's HTTP protocol."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tidegate.engine.checks import RequestError
from tidegate.engine.generate import generate
from tidegate.engine.http import done, error_reply, json_reply, read_body, refused
from tidegate.engine.options import EngineOptions
from tidegate.engine.requests import parse_generate
from tidegate.engine.weights_routes import WEIGHTS_ROUTES
from tidegate.errors import EngineError, TidegateError
from tidegate.serve import Listen, bind, run_app

if TYPE_CHECKING:
    from tidegate.engine.engine import Engine

HEALTH_DEADLINE_S = 20.0
PAUSE_MODES = ("abort", "retract", "in_place")

Handler = Callable[["Engine", Request], Awaitable[Response]]


def serve(options: EngineOptions, listen: Listen) -> None:
    """Serve a model until told to end.

    Raises StartError if it cannot start, EngineError if its scheduler died.
    """
    sock = bind(listen)  # a port in use is said before seconds are spent on loading

    from tidegate.engine.engine import Engine  # imports torch

    engine = Engine.load(options)
    failed = False

    def end() -> None:
        nonlocal failed
        failed = True
        os.kill(os.getpid(), signal.SIGINT)  # uvicorn delivers the replies that are due, then ends

    run_app(create_app(engine, on_death=end), sock, listen)
    if failed:
        raise EngineError(f"the engine's scheduler died: {engine.scheduler.death!r}")


def create_app(engine: Engine, on_death: Callable[[], None] | None = None) -> Starlette:
    """The ASGI app; starts the engine's scheduler with itself. `on_death`: the scheduler died."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        engine.start(on_death)
        yield
        await asyncio.to_thread(engine.scheduler.stop)

    return Starlette(
        routes=[_route(engine, *route) for route in ROUTES],
        lifespan=lifespan,
        exception_handlers={404: _no_such_route, 405: _no_such_route},
    )


def _route(engine: Engine, method: str, path: str, handler: Handler) -> Route:
    @wraps(handler)
    async def endpoint(request: Request) -> Response:
        try:
            return await handler(engine, request)
        except RequestError as error:
            return error_reply(str(error), 400)
        except EngineError as error:
            return error_reply(str(error), 503)

    return Route(path, endpoint, methods=[method])


async def _no_such_route(request: Request, _: Exception) -> Response:
    return error_reply(f"the embedded engine has no {request.method} {request.url.path}", 404)


# -- requests in flight


async def _abort(engine: Engine, request: Request) -> Response:
    body = await read_body(request)
    rid = body.get("rid")
    everything = body.get("abort_all") is True
    if not everything and (not isinstance(rid, str) or not rid):
        raise RequestError(f"rid = {rid!r}: give the beginning of a request id, or abort_all: true")
    aborted = await engine.call(lambda: engine.scheduler.abort(rid or "", everything=everything))
    return done(f"{aborted} requests aborted", aborted=aborted)


async def _pause(engine: Engine, request: Request) -> Response:
    mode = (await read_body(request)).get("mode", "abort")
    if mode not in PAUSE_MODES:
        raise RequestError(f"mode = {mode!r}: it is one of {', '.join(PAUSE_MODES)}")
    await engine.call(lambda: engine.scheduler.pause(mode))
    return done(f"paused ({mode})")


async def _continue(engine: Engine, _: Request) -> Response:
    await engine.call(engine.scheduler.resume)
    return done("continued")


# -- weights


async def _update_weights(engine: Engine, request: Request) -> Response:
    body = await read_body(request)
    path = body.get("model_path")
    if not isinstance(path, str) or not path:
        raise RequestError(f"model_path = {path!r}: give a directory of safetensors")
    version = _version(body.get("weight_version"), "weight_version")
    keep_cache = body.get("flush_cache", True) is False
    abort_all = body.get("abort_all_requests", False) is True
    scheduler = engine.scheduler
    async with engine.loading:
        try:
            weights = await engine.read_weights(Path(path))
        except EngineError:
            raise
        except TidegateError as error:
            return refused(f"{error}; the old weights stay")
        in_flight = await engine.call(
            lambda: scheduler.load(weights, version, keep_cache=keep_cache, abort_all=abort_all)
        )
    return done(f"loaded {path}", num_paused_requests=in_flight, weight_version=scheduler.version)


async def _update_version(engine: Engine, request: Request) -> Response:
    body = await read_body(request)
    version = _version(body.get("new_version"), "new_version")
    if version is None:
        raise RequestError("new_version: give the label of the weights that are loaded")
    if body.get("abort_all_requests", True):
        await engine.call(lambda: engine.scheduler.abort("", everything=True))
    await engine.call(lambda: engine.scheduler.relabel(version))
    return done(f"the weights are version {version}", new_version=version)


def _version(value: Any, name: str) -> str | None:
    if value is None or (isinstance(value, str) and value):
        return value
    if type(value) is int:
        return str(value)
    raise RequestError(f"{name} = {value!r}: it is a string that is not empty")


async def _flush(engine: Engine, _: Request) -> Response:
    if await engine.call(engine.scheduler.flush):
        return done("the cache is empty")
    return refused("requests are running; pause with mode 'retract', or abort them, before a flush")


# -- what state it is in


async def _model_info(engine: Engine, _: Request) -> Response:
    scheduler = engine.scheduler
    path = str(engine.options.model)
    return json_reply(
        {
            "model_path": path,
            "tokenizer_path": path if engine.limits.has_tokenizer else None,
            "is_generation": True,
            "weight_version": scheduler.version,
            "max_context": engine.options.max_context,
            "max_slots": engine.options.max_slots,
            "paused": scheduler.paused,
            "num_running": scheduler.num_running,
            "num_waiting": scheduler.num_waiting,
            **scheduler.totals(),
        }
    )


async def _health(engine: Engine, _: Request) -> Response:
    if engine.scheduler.death is not None:
        return error_reply(f"the scheduler died: {engine.scheduler.death!r}", 503)
    return json_reply({"status": "ok"})


async def _health_generate(engine: Engine, _: Request) -> Response:
    body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    generation = parse_generate(body, engine.limits)
    generation.wake = asyncio.Event()
    engine.scheduler.submit(generation)
    try:
        async with asyncio.timeout(HEALTH_DEADLINE_S):
            await generation.wake.wait()
    except TimeoutError:
        engine.scheduler.call(lambda: engine.scheduler.abort_one(generation))
        why = "it is paused" if engine.scheduler.paused else "it is busy"
        return error_reply(f"no token within {HEALTH_DEADLINE_S:g} s: {why}", 503)
    if generation.error is not None:
        return error_reply(generation.error, 503)
    return json_reply({"status": "ok"})


ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/generate", generate),
    ("POST", "/abort_request", _abort),
    ("POST", "/pause_generation", _pause),
    ("POST", "/continue_generation", _continue),
    ("POST", "/flush_cache", _flush),
    ("POST", "/update_weights_from_disk", _update_weights),
    ("POST", "/update_weight_version", _update_version),
    *WEIGHTS_ROUTES,
    ("GET", "/model_info", _model_info),
    ("GET", "/get_model_info", _model_info),
    ("GET", "/health", _health),
    ("GET", "/health_generate", _health_generate),
)

"""Server process of the embedded engine, which speaks SGLang's HTTP protocol."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from tidegate.engine.options import EngineOptions
from tidegate.engine.requests.request import parse_generate
from tidegate.engine.server.control import HEALTH_DEADLINE_S, read_abort, read_mode, read_relabel, read_update
from tidegate.engine.server.generate import generate
from tidegate.engine.server.http import (
    Handler,
    done,
    error_reply,
    json_reply,
    protocol_app,
    read_body,
    refused,
)
from tidegate.engine.server.weight_routes import WEIGHTS_ROUTES
from tidegate.errors import EngineError, TidegateError
from tidegate.service.serve import Listen, bind, run_app

if TYPE_CHECKING:
    from tidegate.engine.engine import Engine
    from tidegate.engine.scheduling.scheduler import PauseMode

PAUSE_MODES: tuple[PauseMode, ...] = ("abort", "retract", "in_place")


def serve(options: EngineOptions, listen: Listen) -> None:
    """Serves a model until the process is stopped.

    Raises StartError if it cannot start, EngineError if its scheduler failed.
    """
    sock = bind(listen)  # first, so that a port in use is reported before the model is loaded

    from tidegate.engine.engine import Engine  # imports torch

    engine = Engine.load(options)
    failed = False

    def end() -> None:
        nonlocal failed
        failed = True
        os.kill(os.getpid(), signal.SIGINT)  # uvicorn sends the pending replies, then exits

    run_app(create_app(engine, on_failure=end), sock, listen)
    if failed:
        raise EngineError(f"the engine's scheduler failed: {engine.scheduler.failure!r}")


def create_app(engine: Engine, on_failure: Callable[[], None] | None = None) -> Starlette:
    """Returns the ASGI app, which starts the engine; `on_failure` is called if the scheduler fails."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        engine.start(on_failure)
        yield
        await asyncio.to_thread(engine.scheduler.stop)

    return protocol_app(engine, "the embedded engine", ROUTES, lifespan)


# -- requests in flight


async def _abort(engine: Engine, request: Request) -> Response:
    prefix = read_abort(await read_body(request))
    aborted = await engine.call(lambda: engine.scheduler.abort(prefix))
    return done(f"{aborted} requests aborted", aborted=aborted)


async def _pause(engine: Engine, request: Request) -> Response:
    mode = read_mode(await read_body(request), PAUSE_MODES)
    await engine.call(lambda: engine.scheduler.pause(mode))
    return done(f"paused ({mode})")


async def _continue(engine: Engine, _: Request) -> Response:
    await engine.call(engine.scheduler.resume)
    return done("continued")


# -- weights


async def _update_weights(engine: Engine, request: Request) -> Response:
    update = read_update(await read_body(request))
    version, keep_cache, abort_all = update.version, update.keep_cache, update.abort_all
    scheduler = engine.scheduler
    async with engine.loading:
        try:
            weights = await engine.read_weights(update.directory)
        except EngineError:
            raise
        except TidegateError as error:
            return refused(f"{error}; the old weights stay")
        in_flight = await engine.call(
            lambda: scheduler.load(weights, version, keep_cache=keep_cache, abort_all=abort_all)
        )
    return done(f"loaded {update.directory}", num_paused_requests=in_flight, weight_version=scheduler.version)


async def _update_version(engine: Engine, request: Request) -> Response:
    version, abort_all = read_relabel(await read_body(request))
    if abort_all:
        await engine.call(lambda: engine.scheduler.abort("", everything=True))
    await engine.call(lambda: engine.scheduler.relabel(version))
    return done(f"the weights are version {version}", new_version=version)


async def _flush(engine: Engine, _: Request) -> Response:
    if await engine.call(engine.scheduler.flush):
        return done("the cache is empty")
    return refused("requests are running; pause with mode 'retract' or abort them, then flush")


# -- state


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


async def _server_info(engine: Engine, _: Request) -> Response:
    """Returns the device type and parallelism, which a trainer needs before it sends weights."""
    return json_reply({"device": engine.model.device.type, "tp_size": 1, "pp_size": 1, "dp_size": 1})


async def _health(engine: Engine, _: Request) -> Response:
    if engine.scheduler.failure is not None:
        return error_reply(f"the scheduler failed: {engine.scheduler.failure!r}", 503)
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
        why = "the engine is paused" if engine.scheduler.paused else "the engine is busy"
        return error_reply(f"no token within {HEALTH_DEADLINE_S:g} s: {why}", 503)
    if generation.error is not None:
        return error_reply(generation.error, 503)
    return json_reply({"status": "ok"})


ROUTES: tuple[tuple[str, str, Handler[Engine]], ...] = (
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
    ("GET", "/server_info", _server_info),
    ("GET", "/health", _health),
    ("GET", "/health_generate", _health_generate),
)

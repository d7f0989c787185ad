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
from tidegate.engine.server.control import CONTROL_ROUTES
from tidegate.engine.server.generate import generate
from tidegate.engine.server.http import Routes, json_reply, protocol_app
from tidegate.engine.server.weight_routes import WEIGHTS_ROUTES
from tidegate.errors import EngineError
from tidegate.service.serve import Listen, bind, run_app

if TYPE_CHECKING:
    from tidegate.engine.engine import Engine


def serve(options: EngineOptions, listen: Listen, key: str | None = None) -> None:
    """Serves a model until the process is stopped, to callers with the key if there is one.

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

    run_app(create_app(engine, on_failure=end), sock, listen, keyless=key is None, key=key)
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


async def _server_info(engine: Engine, _: Request) -> Response:
    """Returns device type and parallelism, which a trainer needs before it sends weights.

    `stages_weights`: an update is kept beside the live weights until its end.
    """
    info = {"device": engine.model.device.type, "tp_size": 1, "pp_size": 1, "dp_size": 1}
    return json_reply({**info, "stages_weights": True})


ROUTES: Routes[Engine] = (
    ("POST", "/generate", generate),
    ("GET", "/server_info", _server_info),
    *CONTROL_ROUTES,
    *WEIGHTS_ROUTES,
)

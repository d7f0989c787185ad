"""Server process of the embedded engine, which speaks SGLang's HTTP protocol.

Weights are read from files, or are sent over a process group by these calls:

    init_weights_update_group once, then for every version
    begin_weight_update → update_weights_from_distributed for each bucket → end_weight_update

A difference from the live weights is sent in one call, update_weights_from_difference, whose body is the
file `weights.delta` and which SGLang does not have.

Unlike in SGLang, the weights become live all at once at the end (`/server_info` has `stages_weights`), and
requests may run meanwhile. The reply to `end` has the checksum of the received tensors.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from tidegate.engine.options import EngineOptions
from tidegate.engine.requests.request import WeightUpdate
from tidegate.engine.server.control import CONTROL_ROUTES, read_version
from tidegate.engine.server.generate import generate
from tidegate.engine.server.http import Routes, done, json_reply, protocol_app, read_body, refused
from tidegate.engine.validation import RequestError
from tidegate.errors import EngineError
from tidegate.service.serve import Listen, bind, run_app
from tidegate.weights import delta_files
from tidegate.weights.files import WeightsError

if TYPE_CHECKING:
    from tidegate.engine.engine import Engine

GROUP = "weight_update_group"


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


async def _join(engine: Engine, request: Request) -> Response:
    body = await read_body(request)
    name, port = _text(body, "group_name", GROUP), _integer(body, "master_port")
    join = partial(
        engine.receiver.join, _text(body, "master_address"), port, _integer(body, "rank_offset"),
        _integer(body, "world_size"), name, _text(body, "backend", "nccl"),
    )  # fmt: skip
    async with engine.loading:
        await asyncio.to_thread(join)
    return done(f"joined the group {name}")


async def _leave(engine: Engine, request: Request) -> Response:
    name = _text(await read_body(request), "group_name", GROUP)
    async with engine.loading:
        left = await asyncio.to_thread(engine.receiver.leave, name)
    return done(f"left the group {name}") if left else refused(f"there is no group {name!r}")


async def _begin(engine: Engine, _: Request) -> Response:
    async with engine.loading:
        engine.receiver.begin()
    return done("an update is open")


async def _receive(engine: Engine, request: Request) -> Response:
    """Receives a bucket; `weight_version` and `flush_cache` apply to the whole update, at its end."""
    body = await read_body(request)
    names, kinds, shapes = (_list(body, field) for field in ("names", "dtypes", "shapes"))
    if not len(names) == len(kinds) == len(shapes):
        raise RequestError(
            f"{len(names)} names, {len(kinds)} dtypes and {len(shapes)} shapes: give one of each per tensor"
        )
    version = read_version(body, "weight_version")
    async with engine.loading:
        tensors = list(zip(names, kinds, shapes, strict=True))
        receive = partial(engine.receiver.receive, load_format=body.get("load_format"))
        update = await asyncio.to_thread(receive, _text(body, "group_name", GROUP), tensors)
        update.version = version or update.version
        update.keep_cache = body.get("flush_cache", True) is False
    return done(f"received {len(names)} tensors")


async def _end(engine: Engine, _: Request) -> Response:
    async with engine.loading:
        update = engine.receiver.end()
        try:
            weights = await asyncio.to_thread(engine.model.check_weights, update.tensors)
        except WeightsError as error:
            return refused(f"{error}; the old weights stay")
        loaded = await engine.load_checked(weights, update.version, update.keep_cache)
    return done(f"{len(update.tensors)} tensors are live", checksum=update.checksum, **loaded)


async def _apply_difference(engine: Engine, request: Request) -> Response:
    """Applies a difference to the live weights while requests run; these are interrupted only to switch."""
    version = request.query_params.get("weight_version")
    with tempfile.TemporaryDirectory(prefix="tidegate-delta-") as place:
        await asyncio.to_thread(Path(place, delta_files.FILE).write_bytes, await request.body())
        update = WeightUpdate(Path(place), version or None, keep_cache=False, abort_all=False)
        try:
            return done("the difference is applied", **await engine.load_weights(update))
        except WeightsError as error:
            return refused(f"{error}; the old weights stay")


def _text(body: Mapping[str, Any], name: str, default: str | None = None) -> str:
    value = body.get(name, default)
    if not isinstance(value, str) or not value:
        raise RequestError(f"{name} = {value!r}: it must be a non-empty string")
    return value


def _integer(body: Mapping[str, Any], name: str) -> int:
    value = body.get(name)
    if type(value) is not int or value < 0:
        raise RequestError(f"{name} = {value!r}: it must be an integer of at least 0")
    return value


def _list(body: Mapping[str, Any], name: str) -> list[Any]:
    value = body.get(name)
    if not isinstance(value, list):
        raise RequestError(f"{name} = {value!r}: it must be a list")
    return value


ROUTES: Routes[Engine] = (
    ("POST", "/generate", generate),
    ("GET", "/server_info", _server_info),
    *CONTROL_ROUTES,
    ("POST", "/init_weights_update_group", _join),
    ("POST", "/destroy_weights_update_group", _leave),
    ("POST", "/begin_weight_update", _begin),
    ("POST", "/update_weights_from_distributed", _receive),
    ("POST", "/end_weight_update", _end),
    ("POST", "/update_weights_from_difference", _apply_difference),
)

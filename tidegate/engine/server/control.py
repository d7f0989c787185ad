"""Control calls of SGLang's protocol, served alike by the embedded engine and by vLLM's adapter."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from tidegate.engine.requests.request import WeightUpdate
from tidegate.engine.server.http import Routes, done, error_reply, json_reply, read_body, refused
from tidegate.engine.validation import RequestError
from tidegate.weights.files import WeightsError

HEALTH_DEADLINE_S = 20.0
"""Timeout of `/health_generate` in seconds."""


class ControlledEngine(Protocol):
    """What the routes need of an engine. Methods raise EngineError, or RequestError for a refused call."""

    pause_modes: tuple[str, ...]

    @property
    def paused(self) -> object: ...

    async def abort(self, prefix: str) -> int:
        """Ends the requests whose ids begin with `prefix`; returns their number."""

    async def pause(self, mode: str) -> None: ...
    async def resume(self) -> None: ...
    async def load_weights(self, update: WeightUpdate) -> dict[str, Any]:
        """Loads weights; returns further fields of the reply. Raises WeightsError if they do not fit."""

    async def relabel(self, version: str) -> None: ...
    async def flush(self) -> bool:
        """Drops the cache; returns False while requests run."""

    async def info(self) -> dict[str, Any]: ...
    async def check_health(self) -> None: ...
    async def sample_one_token(self) -> None: ...


async def _abort(engine: ControlledEngine, request: Request) -> Response:
    body = await read_body(request)
    rid = body.get("rid")
    if body.get("abort_all") is True:
        rid = ""
    elif not isinstance(rid, str) or not rid:
        raise RequestError(f"rid = {rid!r}: give a prefix of request ids, or abort_all: true")
    aborted = await engine.abort(rid)
    return done(f"{aborted} requests aborted", aborted=aborted)


async def _pause(engine: ControlledEngine, request: Request) -> Response:
    mode = (await read_body(request)).get("mode", "abort")
    if mode not in engine.pause_modes:
        raise RequestError(f"mode = {mode!r}: it must be one of {', '.join(engine.pause_modes)}")
    await engine.pause(mode)
    return done(f"paused ({mode})")


async def _continue(engine: ControlledEngine, _: Request) -> Response:
    await engine.resume()
    return done("continued")


async def _update_weights(engine: ControlledEngine, request: Request) -> Response:
    body = await read_body(request)
    path = body.get("model_path")
    if not isinstance(path, str) or not path:
        raise RequestError(f"model_path = {path!r}: give a directory of safetensors")
    update = WeightUpdate(
        Path(path),
        read_version(body, "weight_version"),
        keep_cache=body.get("flush_cache", True) is False,
        abort_all=body.get("abort_all_requests") is True,
    )
    try:
        return done(f"loaded {path}", **await engine.load_weights(update))
    except WeightsError as error:
        return refused(f"{error}; the old weights stay")


async def _update_version(engine: ControlledEngine, request: Request) -> Response:
    body = await read_body(request)
    version = read_version(body, "new_version")
    if version is None:
        raise RequestError("new_version: give the version label of the loaded weights")
    if body.get("abort_all_requests", True):
        await engine.abort("")
    await engine.relabel(version)
    return done(f"the weights are version {version}", new_version=version)


def read_version(body: Mapping[str, Any], name: str) -> str | None:
    """Returns a version label, or None if none is given. Raises RequestError."""
    value = body.get(name)
    if value is None or (isinstance(value, str) and value):
        return value
    if type(value) is int:
        return str(value)
    raise RequestError(f"{name} = {value!r}: it must be a non-empty string")


async def _flush(engine: ControlledEngine, _: Request) -> Response:
    if await engine.flush():
        return done("the cache is empty")
    return refused("requests are running; pause with mode 'retract' or abort them, then flush")


async def _model_info(engine: ControlledEngine, _: Request) -> Response:
    return json_reply({"is_generation": True, "paused": engine.paused, **await engine.info()})


async def _health(engine: ControlledEngine, _: Request) -> Response:
    await engine.check_health()
    return json_reply({"status": "ok"})


async def _health_generate(engine: ControlledEngine, _: Request) -> Response:
    try:
        async with asyncio.timeout(HEALTH_DEADLINE_S):
            await engine.sample_one_token()
    except TimeoutError:
        state = "paused" if engine.paused else "busy"
        return error_reply(f"no token within {HEALTH_DEADLINE_S:g} s: the engine is {state}", 503)
    return json_reply({"status": "ok"})


CONTROL_ROUTES: Routes[ControlledEngine] = (
    ("POST", "/abort_request", _abort),
    ("POST", "/pause_generation", _pause),
    ("POST", "/continue_generation", _continue),
    ("POST", "/flush_cache", _flush),
    ("POST", "/update_weights_from_disk", _update_weights),
    ("POST", "/update_weight_version", _update_version),
    ("GET", "/model_info", _model_info),
    ("GET", "/get_model_info", _model_info),
    ("GET", "/health", _health),
    ("GET", "/health_generate", _health_generate),
)

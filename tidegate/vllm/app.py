"""The routes of SGLang's protocol that vLLM can serve."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import wraps
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tidegate.engine.checks import RequestError
from tidegate.engine.http import error_reply, json_reply, read_body
from tidegate.engine.requests import Generation
from tidegate.errors import EngineError, TidegateError
from tidegate.serve import Listen, bind, run_app
from tidegate.vllm.bridge import Bridge, read_label, read_update
from tidegate.vllm.options import VLLMOptions
from tidegate.vllm.weights import WeightsError

HEALTH_DEADLINE_S = 20.0
PAUSE_MODES = ("abort", "retract")

Handler = Callable[[Bridge, Request], Awaitable[Response]]


def serve(options: VLLMOptions, listen: Listen) -> None:
    """Start vLLM and serve until told to end. Raises StartError where it can't start, EngineError where it
    died."""
    sock = bind(listen)
    failures: list[TidegateError] = []
    try:
        run_app(create_app(Bridge(options), failures.append), sock, listen)
    finally:
        if failures:
            raise failures[0]  # also in place of uvicorn's exit


def create_app(bridge: Bridge, failed: Callable[[TidegateError], None]) -> Starlette:
    """The ASGI app; it starts vLLM with itself. `failed` is told why, where it can't or where vLLM dies."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            try:
                await bridge.start(stack)
            except TidegateError as error:
                failed(error)
                raise
            watch = asyncio.create_task(_watch(bridge, failed), name="vLLM")
            yield
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    return Starlette(
        routes=[_route(bridge, *route) for route in ROUTES],
        lifespan=lifespan,
        exception_handlers={404: _no_such_route, 405: _no_such_route},
    )


async def _watch(bridge: Bridge, failed: Callable[[TidegateError], None]) -> None:
    failed(EngineError(await bridge.process.died()))
    os.kill(os.getpid(), signal.SIGINT)  # uvicorn delivers the replies that are due, then ends


def _route(bridge: Bridge, method: str, path: str, handler: Handler) -> Route:
    @wraps(handler)
    async def endpoint(request: Request) -> Response:
        try:
            return await handler(bridge, request)
        except RequestError as error:
            return error_reply(str(error), 400)
        except WeightsError as error:
            return _refused(f"{error}; the old weights stay")
        except EngineError as error:
            return error_reply(str(error), 503)

    return Route(path, endpoint, methods=[method])


async def _no_such_route(request: Request, _: Exception) -> Response:
    return error_reply(f"vLLM behind SGLang's protocol has no {request.method} {request.url.path}", 404)


# -- requests


async def _generate(bridge: Bridge, request: Request) -> Response:
    try:
        generation = bridge.read(await read_body(request))
    except ClientDisconnect:
        return Response(status_code=499)
    if generation.stream:
        return StreamingResponse(_events(bridge, generation), media_type="text/event-stream")
    work = asyncio.create_task(bridge.sample(generation))
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
        return json_reply(work.result()) if work.done() else Response(status_code=499)
    finally:
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(bridge: Bridge, generation: Generation) -> AsyncIterator[bytes]:
    """Cumulative events; an error is one too, for the status went out before it."""
    try:
        async with contextlib.aclosing(bridge.stream(generation)) as replies:
            async for reply in replies:
                yield _event(reply)
    except RequestError as error:
        yield _event({"error": {"message": str(error), "code": 400}})
    except EngineError as error:
        yield _event({"error": {"message": str(error), "code": 503}})
    yield b"data: [DONE]\n\n"


def _event(value: Any) -> bytes:
    return b"data: " + orjson.dumps(value) + b"\n\n"


async def _abort(bridge: Bridge, request: Request) -> Response:
    body = await read_body(request)
    rid = body.get("rid")
    everything = body.get("abort_all") is True
    if not everything and (not isinstance(rid, str) or not rid):
        raise RequestError(f"rid = {rid!r}: give the beginning of a request id, or abort_all: true")
    aborted = await bridge.abort("" if everything else str(rid))
    return _done(f"{aborted} requests aborted", aborted=aborted)


async def _pause(bridge: Bridge, request: Request) -> Response:
    mode = (await read_body(request)).get("mode", "abort")
    if mode not in PAUSE_MODES:
        raise RequestError(
            f"mode = {mode!r}: it is one of {', '.join(PAUSE_MODES)}; both end what runs with its tokens"
        )
    await bridge.pause()
    return _done("paused")


async def _continue(bridge: Bridge, _: Request) -> Response:
    await bridge.resume()
    return _done("continued")


# -- weights


async def _update_weights(bridge: Bridge, request: Request) -> Response:
    directory, version, abort = read_update(await read_body(request))
    label = await bridge.load(directory, version, abort=abort)
    return _done(f"loaded {directory}", weight_version=label)


async def _update_version(bridge: Bridge, request: Request) -> Response:
    body = await read_body(request)
    version = read_label(body.get("new_version"), "new_version")
    if version is None:
        raise RequestError("new_version: give the label of the weights that are loaded")
    if body.get("abort_all_requests", True):
        await bridge.abort("")
    await bridge.relabel(version)
    return _done(f"the weights are version {version}", new_version=version)


async def _flush(bridge: Bridge, _: Request) -> Response:
    if await bridge.flush():
        return _done("the cache is empty")
    return _refused("requests are running; pause, or abort them, before a flush")


def _done(message: str, **more: Any) -> Response:
    return json_reply({"success": True, "message": message, **more})


def _refused(message: str) -> Response:
    return json_reply({"success": False, "message": message}, 400)


# -- what state it is in


async def _model_info(bridge: Bridge, _: Request) -> Response:
    path = str(bridge.options.model)
    return json_reply(
        {
            "model_path": path,
            "tokenizer_path": path if bridge.limits.has_tokenizer else None,
            "is_generation": True,
            "weight_version": await bridge.attested(),
            "max_context": bridge.limits.max_context,
            "paused": bridge.paused,
            "num_running": bridge.num_running,
        }
    )


async def _health(bridge: Bridge, _: Request) -> Response:
    await bridge.upstream.healthy()
    return json_reply({"status": "ok"})


async def _health_generate(bridge: Bridge, _: Request) -> Response:
    body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    try:
        async with asyncio.timeout(HEALTH_DEADLINE_S):
            await bridge.sample(bridge.read(body))
    except TimeoutError:
        why = "it is paused" if bridge.paused else "it is busy"
        return error_reply(f"no token within {HEALTH_DEADLINE_S:g} s: {why}", 503)
    return json_reply({"status": "ok"})


ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/generate", _generate),
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

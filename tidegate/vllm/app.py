"""Serves the routes of SGLang's protocol that vLLM supports."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from tidegate.engine.requests.request import Generation
from tidegate.engine.server.control import HEALTH_DEADLINE_S, read_abort, read_mode, read_relabel, read_update
from tidegate.engine.server.http import (
    Handler,
    done,
    error_reply,
    event,
    json_reply,
    protocol_app,
    read_body,
    refused,
)
from tidegate.engine.validation import RequestError
from tidegate.errors import EngineError, TidegateError
from tidegate.service.serve import Listen, bind, run_app
from tidegate.vllm.adapter import EngineAdapter
from tidegate.vllm.options import VLLMOptions
from tidegate.weights.files import WeightsError

PAUSE_MODES = ("abort", "retract")


def serve(options: VLLMOptions, listen: Listen) -> None:
    """Start vLLM and serve until a signal. Raises StartError, or EngineError if vLLM exits later."""
    sock = bind(listen)
    failures: list[TidegateError] = []
    try:
        run_app(create_app(EngineAdapter(options), failures.append), sock, listen)
    finally:
        if failures:
            raise failures[0]  # instead of uvicorn's SystemExit


def create_app(engine: EngineAdapter, failed: Callable[[TidegateError], None]) -> Starlette:
    """The ASGI app, whose lifespan starts vLLM; `failed` receives the error if vLLM fails or exits."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            try:
                await engine.start(stack)
            except TidegateError as error:
                failed(error)
                raise
            watch = asyncio.create_task(_watch(engine, failed), name="vLLM")
            yield
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    return protocol_app(engine, "vLLM behind SGLang's protocol", ROUTES, lifespan)


async def _watch(engine: EngineAdapter, failed: Callable[[TidegateError], None]) -> None:
    failed(EngineError(await engine.process.wait_for_exit()))
    os.kill(os.getpid(), signal.SIGINT)  # uvicorn finishes pending replies, then exits


# -- requests


async def _generate(engine: EngineAdapter, request: Request) -> Response:
    try:
        generation = engine.read(await read_body(request))
    except ClientDisconnect:
        return Response(status_code=499)
    if generation.stream:
        return StreamingResponse(_events(engine, generation), media_type="text/event-stream")
    work = asyncio.create_task(engine.sample(generation))
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


async def _events(engine: EngineAdapter, generation: Generation) -> AsyncIterator[bytes]:
    """Cumulative events; an error is an event too, because the status is already sent."""
    try:
        async with contextlib.aclosing(engine.stream(generation)) as replies:
            async for reply in replies:
                yield event(reply)
    except RequestError as error:
        yield event({"error": {"message": str(error), "code": 400}})
    except EngineError as error:
        yield event({"error": {"message": str(error), "code": 503}})
    yield b"data: [DONE]\n\n"


async def _abort(engine: EngineAdapter, request: Request) -> Response:
    aborted = await engine.abort(read_abort(await read_body(request)))
    return done(f"{aborted} requests aborted", aborted=aborted)


async def _pause(engine: EngineAdapter, request: Request) -> Response:
    """Pause; both modes abort running requests, returning their tokens."""
    read_mode(await read_body(request), PAUSE_MODES)
    await engine.pause()
    return done("paused")


async def _continue(engine: EngineAdapter, _: Request) -> Response:
    await engine.resume()
    return done("continued")


# -- weights


async def _update_weights(engine: EngineAdapter, request: Request) -> Response:
    update = read_update(await read_body(request))
    if update.keep_cache:
        raise RequestError(
            "flush_cache = false: vLLM's cache does not record the weight versions of its entries; use true"
        )
    try:
        label = await engine.load(update.directory, update.version, abort=update.abort_all)
    except WeightsError as error:
        return refused(f"{error}; the previous weights stay loaded")
    return done(f"loaded {update.directory}", weight_version=label)


async def _update_version(engine: EngineAdapter, request: Request) -> Response:
    version, abort_all = read_relabel(await read_body(request))
    if abort_all:
        await engine.abort("")
    await engine.relabel(version)
    return done(f"the weight version is {version}", new_version=version)


async def _flush(engine: EngineAdapter, _: Request) -> Response:
    if await engine.flush():
        return done("the cache is empty")
    return refused("requests are running; pause or abort them before a flush")


# -- state


async def _model_info(engine: EngineAdapter, _: Request) -> Response:
    path = str(engine.options.model)
    return json_reply(
        {
            "model_path": path,
            "tokenizer_path": path if engine.limits.has_tokenizer else None,
            "is_generation": True,
            "weight_version": await engine.attested(),
            "max_context": engine.limits.max_context,
            "paused": engine.paused,
            "num_running": engine.num_running,
        }
    )


async def _health(engine: EngineAdapter, _: Request) -> Response:
    await engine.upstream.healthy()
    return json_reply({"status": "ok"})


async def _health_generate(engine: EngineAdapter, _: Request) -> Response:
    body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    try:
        async with asyncio.timeout(HEALTH_DEADLINE_S):
            await engine.sample(engine.read(body))
    except TimeoutError:
        state = "paused" if engine.paused else "busy"
        return error_reply(f"no token within {HEALTH_DEADLINE_S:g} s: the engine is {state}", 503)
    return json_reply({"status": "ok"})


ROUTES: tuple[tuple[str, str, Handler[EngineAdapter]], ...] = (
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

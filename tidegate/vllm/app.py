"""The routes of SGLang's protocol that vLLM can serve."""

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
    """Start vLLM and serve until told to end. Raises StartError where it can't start, EngineError where it
    died."""
    sock = bind(listen)
    failures: list[TidegateError] = []
    try:
        run_app(create_app(EngineAdapter(options), failures.append), sock, listen)
    finally:
        if failures:
            raise failures[0]  # also in place of uvicorn's exit


def create_app(bridge: EngineAdapter, failed: Callable[[TidegateError], None]) -> Starlette:
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

    return protocol_app(bridge, "vLLM behind SGLang's protocol", ROUTES, lifespan)


async def _watch(bridge: EngineAdapter, failed: Callable[[TidegateError], None]) -> None:
    failed(EngineError(await bridge.process.wait_for_exit()))
    os.kill(os.getpid(), signal.SIGINT)  # uvicorn delivers the replies that are due, then ends


# -- requests


async def _generate(bridge: EngineAdapter, request: Request) -> Response:
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


async def _events(bridge: EngineAdapter, generation: Generation) -> AsyncIterator[bytes]:
    """Cumulative events; an error is one too, for the status went out before it."""
    try:
        async with contextlib.aclosing(bridge.stream(generation)) as replies:
            async for reply in replies:
                yield event(reply)
    except RequestError as error:
        yield event({"error": {"message": str(error), "code": 400}})
    except EngineError as error:
        yield event({"error": {"message": str(error), "code": 503}})
    yield b"data: [DONE]\n\n"


async def _abort(bridge: EngineAdapter, request: Request) -> Response:
    aborted = await bridge.abort(read_abort(await read_body(request)))
    return done(f"{aborted} requests aborted", aborted=aborted)


async def _pause(bridge: EngineAdapter, request: Request) -> Response:
    """Either mode ends what runs, with its tokens."""
    read_mode(await read_body(request), PAUSE_MODES)
    await bridge.pause()
    return done("paused")


async def _continue(bridge: EngineAdapter, _: Request) -> Response:
    await bridge.resume()
    return done("continued")


# -- weights


async def _update_weights(bridge: EngineAdapter, request: Request) -> Response:
    update = read_update(await read_body(request))
    if update.keep_cache:
        raise RequestError("flush_cache = false: vLLM's cache does not tell under which weights it was made")
    try:
        label = await bridge.load(update.directory, update.version, abort=update.abort_all)
    except WeightsError as error:
        return refused(f"{error}; the old weights stay")
    return done(f"loaded {update.directory}", weight_version=label)


async def _update_version(bridge: EngineAdapter, request: Request) -> Response:
    version, abort_all = read_relabel(await read_body(request))
    if abort_all:
        await bridge.abort("")
    await bridge.relabel(version)
    return done(f"the weights are version {version}", new_version=version)


async def _flush(bridge: EngineAdapter, _: Request) -> Response:
    if await bridge.flush():
        return done("the cache is empty")
    return refused("requests are running; pause, or abort them, before a flush")


# -- what state it is in


async def _model_info(bridge: EngineAdapter, _: Request) -> Response:
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


async def _health(bridge: EngineAdapter, _: Request) -> Response:
    await bridge.upstream.healthy()
    return json_reply({"status": "ok"})


async def _health_generate(bridge: EngineAdapter, _: Request) -> Response:
    body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    try:
        async with asyncio.timeout(HEALTH_DEADLINE_S):
            await bridge.sample(bridge.read(body))
    except TimeoutError:
        why = "it is paused" if bridge.paused else "it is busy"
        return error_reply(f"no token within {HEALTH_DEADLINE_S:g} s: {why}", 503)
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

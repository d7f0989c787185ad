"""Serves the routes of SGLang's protocol that vLLM supports."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from tidegate.engine.requests.request import Generation
from tidegate.engine.server.control import CONTROL_ROUTES
from tidegate.engine.server.http import Routes, disconnected, event, json_reply, protocol_app, read_body
from tidegate.engine.validation import RequestError
from tidegate.errors import EngineError, TidegateError
from tidegate.service.serve import Listen, bind, run_app
from tidegate.vllm.adapter import EngineAdapter
from tidegate.vllm.process import VLLMOptions


def serve(options: VLLMOptions, listen: Listen, key: str | None = None) -> None:
    """Start vLLM and serve until a signal, to callers with the key if there is one.

    Raises StartError, or EngineError if vLLM exits later.
    """
    sock = bind(listen)
    failures: list[TidegateError] = []
    try:
        run_app(
            create_app(EngineAdapter(options), failures.append), sock, listen, keyless=key is None, key=key
        )
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


async def _generate(engine: EngineAdapter, request: Request) -> Response:
    generation = engine.read(await read_body(request))
    if generation.stream:
        return StreamingResponse(_events(engine, generation), media_type="text/event-stream")
    work = asyncio.create_task(engine.sample(generation))
    gone = asyncio.create_task(disconnected(request))
    try:
        await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
        return json_reply(work.result()) if work.done() else Response(status_code=499)
    finally:
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def _events(engine: EngineAdapter, generation: Generation) -> AsyncIterator[bytes]:
    """Cumulative events; an error is an event too, because the status is already sent."""
    try:
        async with contextlib.aclosing(engine.stream(generation)) as replies:
            async for reply in replies:
                yield event(reply)
    except (RequestError, EngineError) as error:
        code = 400 if isinstance(error, RequestError) else 503
        yield event({"error": {"message": str(error), "code": code}})
    yield b"data: [DONE]\n\n"


ROUTES: Routes[EngineAdapter] = (("POST", "/generate", _generate), *CONTROL_ROUTES)

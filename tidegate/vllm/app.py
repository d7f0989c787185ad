"""Serves the routes of SGLang's protocol that vLLM supports."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable

from starlette.applications import Starlette

from tidegate.engine.server.adapter import ROUTES
from tidegate.engine.server.http import protocol_app
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

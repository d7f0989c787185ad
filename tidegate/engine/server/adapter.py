"""Routes of an engine that passes requests on to another server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from tidegate.engine.requests.request import Generation
from tidegate.engine.server.control import CONTROL_ROUTES, ControlledEngine
from tidegate.engine.server.generate import reply
from tidegate.engine.server.http import Routes, disconnected, event, json_reply, read_body
from tidegate.engine.validation import RequestError
from tidegate.errors import EngineError
from tidegate.types import PACKED_LISTS


class AdaptedEngine(ControlledEngine, Protocol):
    """An engine in another server. Methods raise EngineError, or RequestError for a refused call."""

    def read(self, body: Mapping[str, Any]) -> Generation: ...
    async def sample(self, generation: Generation) -> dict[str, Any]:
        """Return the complete reply. Cancelling aborts the request."""

    def stream(self, generation: Generation) -> AsyncGenerator[dict[str, Any]]:
        """Yield cumulative replies. Closing the generator aborts the request."""


async def _generate(engine: AdaptedEngine, request: Request) -> Response:
    generation = engine.read(await read_body(request))
    generation.packed_lists = PACKED_LISTS in request.headers
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


async def _events(engine: AdaptedEngine, generation: Generation) -> AsyncIterator[bytes]:
    """Cumulative events; an error is an event too, because the status is already sent."""
    try:
        async with contextlib.aclosing(engine.stream(generation)) as replies:
            async for one in replies:
                yield event(one)
    except (RequestError, EngineError) as error:
        code = 400 if isinstance(error, RequestError) else 503
        yield event({"error": {"message": str(error), "code": code}})
    yield b"data: [DONE]\n\n"


def answer(generation: Generation, version: str) -> dict[str, Any]:
    """The reply in SGLang's form, without text: the gateway decodes ids itself."""
    body = reply(generation, len(generation.output_ids), "", version)
    del body["text"]
    return body


ROUTES: Routes[AdaptedEngine] = (("POST", "/generate", _generate), *CONTROL_ROUTES)

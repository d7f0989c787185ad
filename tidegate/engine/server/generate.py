"""`POST /generate`: replies sampled for one prompt, whole or as a stream of events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from tidegate.engine.requests.request import Generation, parse_generate, samples_of
from tidegate.engine.server.http import error_reply, event, json_reply, read_body
from tidegate.engine.server.replies import reply
from tidegate.errors import EngineError

if TYPE_CHECKING:
    from tidegate.engine.engine import Engine


async def generate(engine: Engine, request: Request) -> Response:
    """One reply, or a list of them where `n` asks for several (as in SGLang)."""
    try:
        body = await read_body(request)
    except ClientDisconnect:
        return Response(status_code=499)
    asked = parse_generate(body, engine.limits)
    if asked.params.grammar is not None:
        asked.grammar = await asyncio.to_thread(engine.grammars.compile, asked.params.grammar)
    samples = samples_of(asked)
    wake = asyncio.Event()
    for one in samples:
        one.wake = wake
        engine.scheduler.submit(one)
    if asked.stream:
        return StreamingResponse(_stream(engine, request, samples, wake), media_type="text/event-stream")
    async with _watched(engine, request, samples, wake) as gone:
        while not gone.is_set() and not _over(samples):
            await wake.wait()
            wake.clear()
    failed = _failed(samples)
    if failed is not None:
        assert failed.error is not None
        return error_reply(failed.error, 400 if failed.refused else 500)
    if gone.is_set() and not _over(samples):
        return Response(status_code=499)
    replies = [_final(engine, one) for one in samples]
    return json_reply(replies if asked.params.n > 1 else replies[0])


def _over(samples: Sequence[Generation]) -> bool:
    return all(one.ended for one in samples) or _failed(samples) is not None


def _failed(samples: Sequence[Generation]) -> Generation | None:
    return next((one for one in samples if one.error is not None), None)


@contextlib.asynccontextmanager
async def _watched(
    engine: Engine, request: Request, samples: Sequence[Generation], wake: asyncio.Event
) -> AsyncIterator[asyncio.Event]:
    """While in here, a client that goes away wakes the waiter; what is unfinished on leaving is aborted."""
    gone = asyncio.Event()

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone.set()
        wake.set()

    watcher = asyncio.create_task(watch())
    try:
        yield gone
    finally:
        watcher.cancel()
        with contextlib.suppress(EngineError):  # it died, and has ended everything
            for one in samples:
                if not one.ended:
                    engine.scheduler.call(partial(engine.scheduler.abort_one, one))


async def _stream(
    engine: Engine, request: Request, samples: Sequence[Generation], wake: asyncio.Event
) -> AsyncIterator[bytes]:
    """Cumulative events; where there are several replies, `index` says whose each is (as in SGLang)."""
    tracks = [_Track(engine, one, index if len(samples) > 1 else None) for index, one in enumerate(samples)]
    async with _watched(engine, request, samples, wake) as gone:
        while not all(track.told for track in tracks):
            await wake.wait()
            wake.clear()
            if gone.is_set():
                return
            failed = _failed(samples)
            if failed is not None:
                yield event({"error": {"message": failed.error}})
                break
            for track in tracks:
                news = track.news()
                if news is not None:
                    yield news
    yield b"data: [DONE]\n\n"


class _Track:
    """What of one reply has been told."""

    def __init__(self, engine: Engine, generation: Generation, index: int | None) -> None:
        self.told = False
        self._engine = engine
        self._generation = generation
        self._following = engine.text.follow(generation)
        self._index = {} if index is None else {"index": index}
        self._sent = 0

    def news(self) -> bytes | None:
        """The event that is due, or None."""
        generation = self._generation
        if self.told:
            return None
        count = len(generation.logprobs)
        if generation.ended:
            self.told = True
            return event({**_final(self._engine, generation), **self._index})
        if count == self._sent:
            return None
        self._sent = count
        value = reply(generation, count, self._following.upto(count), self._engine.scheduler.version)
        return event({**value, **self._index})


def _final(engine: Engine, generation: Generation) -> dict[str, Any]:
    text = engine.text.reply(generation)
    return reply(generation, len(generation.output_ids), text, engine.scheduler.version)

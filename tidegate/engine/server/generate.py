"""`POST /generate`: replies to one prompt, complete or as a stream of events."""

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
    """Returns one reply, or a list of replies if `n` is more than 1 (as in SGLang)."""
    try:
        body = await read_body(request)
    except ClientDisconnect:
        return Response(status_code=499)
    generation = parse_generate(body, engine.limits)
    if generation.params.grammar is not None:
        generation.grammar = await asyncio.to_thread(engine.grammars.compile, generation.params.grammar)
    samples = samples_of(generation)
    wake = asyncio.Event()
    for sample in samples:
        sample.wake = wake
        engine.scheduler.submit(sample)
    if generation.stream:
        return StreamingResponse(_stream(engine, request, samples, wake), media_type="text/event-stream")
    async with _abort_on_exit(engine, request, samples, wake) as disconnected:
        while not disconnected.is_set() and not _finished(samples):
            await wake.wait()
            wake.clear()
    failed = _failed(samples)
    if failed is not None:
        assert failed.error is not None
        return error_reply(failed.error, 400 if failed.refused else 500)
    if disconnected.is_set() and not _finished(samples):
        return Response(status_code=499)
    replies = [_final(engine, sample) for sample in samples]
    return json_reply(replies if generation.params.n > 1 else replies[0])


def _finished(samples: Sequence[Generation]) -> bool:
    return all(sample.ended for sample in samples) or _failed(samples) is not None


def _failed(samples: Sequence[Generation]) -> Generation | None:
    return next((sample for sample in samples if sample.error is not None), None)


@contextlib.asynccontextmanager
async def _abort_on_exit(
    engine: Engine, request: Request, samples: Sequence[Generation], wake: asyncio.Event
) -> AsyncIterator[asyncio.Event]:
    """Yields an event that is set, together with `wake`, when the client disconnects.

    Aborts unfinished samples on exit.
    """
    disconnected = asyncio.Event()

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        disconnected.set()
        wake.set()

    watcher = asyncio.create_task(watch())
    try:
        yield disconnected
    finally:
        watcher.cancel()
        with contextlib.suppress(EngineError):  # the scheduler failed and has ended all requests
            for sample in samples:
                if not sample.ended:
                    engine.scheduler.call(partial(engine.scheduler.abort_one, sample))


async def _stream(
    engine: Engine, request: Request, samples: Sequence[Generation], wake: asyncio.Event
) -> AsyncIterator[bytes]:
    """Yields cumulative events; with several replies, `index` is the number of the reply (as in SGLang)."""
    streams = [
        _ReplyStream(engine, sample, index if len(samples) > 1 else None)
        for index, sample in enumerate(samples)
    ]
    async with _abort_on_exit(engine, request, samples, wake) as disconnected:
        while not all(stream.done for stream in streams):
            await wake.wait()
            wake.clear()
            if disconnected.is_set():
                return
            failed = _failed(samples)
            if failed is not None:
                yield event({"error": {"message": failed.error}})
                break
            for stream in streams:
                due = stream.next_event()
                if due is not None:
                    yield due
    yield b"data: [DONE]\n\n"


class _ReplyStream:
    """Events of one reply."""

    def __init__(self, engine: Engine, generation: Generation, index: int | None) -> None:
        self.done = False
        self._engine = engine
        self._generation = generation
        self._detokenizer = engine.detokenizer.incremental(generation)
        self._index = {} if index is None else {"index": index}
        self._sent = 0

    def next_event(self) -> bytes | None:
        """Returns the event that is due, or None."""
        generation = self._generation
        if self.done:
            return None
        count = len(generation.logprobs)
        if generation.ended:
            self.done = True
            return event({**_final(self._engine, generation), **self._index})
        if count == self._sent:
            return None
        self._sent = count
        text = self._detokenizer.decode_first(count)
        value = reply(generation, count, text, self._engine.scheduler.version)
        return event({**value, **self._index})


def _final(engine: Engine, generation: Generation) -> dict[str, Any]:
    text = engine.detokenizer.reply(generation)
    return reply(generation, len(generation.output_ids), text, engine.scheduler.version)

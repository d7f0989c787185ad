"""`POST /generate`: replies to one prompt, complete or as a stream of events, in SGLang's shape."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from tidegate.engine.requests.detokenizer import IncrementalDecoder
from tidegate.engine.requests.request import Generation, TokenLogprob, parse_generate, samples_of
from tidegate.engine.server.http import disconnected, error_reply, event, json_reply, read_body
from tidegate.engine.validation import RequestError
from tidegate.types import PACKED_LISTS

if TYPE_CHECKING:
    from tidegate.engine.engine import Engine


async def generate(engine: Engine, request: Request) -> Response:
    """Returns one reply, or a list of replies if `n` is more than 1 (as in SGLang)."""
    generation = parse_generate(await read_body(request), engine.limits)
    generation.packed_lists = PACKED_LISTS in request.headers
    if generation.experts_start is not None and not engine.model.routers:
        raise RequestError(
            f"return_routed_experts = true: {type(engine.model.hf_model).__name__} has no experts that this "
            "engine knows; switch trainer.routing_replay off"
        )
    if generation.params.grammar is not None:
        generation.grammar = await asyncio.to_thread(engine.grammars.compile, generation.params.grammar)
    samples = samples_of(generation)
    wake = asyncio.Event()
    for sample in samples:
        sample.wake = wake
        engine.scheduler.submit(sample)
    if generation.stream:
        return StreamingResponse(_stream(engine, request, samples, wake), media_type="text/event-stream")
    async with _abort_on_exit(engine, request, samples, wake) as gone:
        while not gone.done() and not _finished(samples):
            await wake.wait()
            wake.clear()
    failed = _failed(samples)
    if failed is not None:
        assert failed.error is not None
        return error_reply(failed.error, 400 if failed.refused else 500)
    if gone.done() and not _finished(samples):
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
) -> AsyncIterator[asyncio.Task[None]]:
    """Yields a task that is done, and sets `wake`, when the client disconnects.

    Aborts unfinished samples on exit.
    """
    gone = asyncio.create_task(disconnected(request))
    gone.add_done_callback(lambda _: wake.set())
    try:
        yield gone
    finally:
        gone.cancel()
        engine.abort_unfinished(samples)


async def _stream(
    engine: Engine, request: Request, samples: Sequence[Generation], wake: asyncio.Event
) -> AsyncIterator[bytes]:
    """Yields cumulative events; with several replies, `index` is the number of the reply (as in SGLang)."""
    streams = [
        _ReplyStream(engine, sample, index if len(samples) > 1 else None)
        for index, sample in enumerate(samples)
    ]
    async with _abort_on_exit(engine, request, samples, wake) as gone:
        while not all(stream.done for stream in streams):
            await wake.wait()
            wake.clear()
            if gone.done():
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
        self._detokenizer = IncrementalDecoder(engine.detokenizer, generation)
        self._index = {} if index is None else {"index": index}
        self._sent = 0

    def next_event(self) -> bytes | None:
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


def reply(generation: Generation, count: int, text: str, version: str) -> dict[str, Any]:
    """Returns the reply with the first `count` output tokens; `version` is the live weights' label.

    `weight_versions` covers the output exactly and is present once the request has ended, as in SGLang.
    `input_token_logprobs` has the prompt's tokens from `logprob_start_len` on; as in SGLang, the first has no
    logprob. `input_top_logprobs` has the likeliest ids at the same positions, if they were requested, and
    `output_top_logprobs` those in place of each output token; with `PACKED_LISTS` as
    `LISTED` of all tokens in base64, a third of the bytes; a stream has these in its last event, as
    `output_token_sampling_mask`, the ids that top-p, top-k and min-p kept at each output token, and
    `output_token_sampling_logprobs`, its logprob among them, if `return_sampling_mask` requested them, and
    `routed_experts`, those of the tokens from `routed_experts_start_len` to the last but one, int32
    [tokens, layers, k] in base64. `kv_version` is present only if keys and values of older weights were kept.
    With a grammar, `output_token_choices` is the number of ids that the grammar allowed for each token: 1 if
    the token was forced, and its logprob is then 0. `output_token_masses` is the total probability of these
    ids before the grammar excluded the others: 1 if the grammar changed nothing.
    """
    meta: dict[str, Any] = {
        "id": generation.rid,
        "finish_reason": generation.finish_reason,
        "prompt_tokens": len(generation.prompt_ids),
        "completion_tokens": count,
        "cached_tokens": generation.cached_tokens,
        "weight_version": version,
    }
    if generation.return_logprob:
        pairs = zip(generation.logprobs[:count], generation.output_ids, itertools.repeat(None), strict=False)
        meta["output_token_logprobs"] = list(pairs)
    if generation.top_logprobs and generation.ended:
        meta["output_top_logprobs"] = _listed(generation)
    if generation.sampling_mask and generation.ended:
        meta["output_token_sampling_mask"] = generation.kept
        meta["output_token_sampling_logprobs"] = generation.kept_logprobs
    if generation.experts and generation.ended:
        meta["routed_experts"] = base64.b64encode(np.concatenate(generation.experts).tobytes()).decode()
    if generation.logprob_start is not None:
        asked = generation.prompt_ids[generation.logprob_start :]
        values = [None, *generation.prompt_logprobs]
        meta["input_token_logprobs"] = list(zip(values, asked, itertools.repeat(None), strict=False))
        if generation.top_logprobs:
            meta["input_top_logprobs"] = [None, *_triples(generation.prompt_top)]
    if generation.grammar is not None:
        meta["output_token_choices"] = generation.grammar.choices[:count]
        meta["output_token_masses"] = generation.grammar.masses[:count]
    if generation.ended:
        meta["weight_version"] = generation.spans[-1][0] if generation.spans else version
        meta["weight_versions"] = [{"version": v, "start": s, "end": e} for v, s, e in generation.spans]
        meta["e2e_latency"] = time.monotonic() - generation.started
    if generation.kv_version is not None:
        meta["kv_version"] = generation.kv_version
    return {"text": text, "output_ids": generation.output_ids[:count], "meta_info": meta}


def _listed(generation: Generation) -> str | list[list[tuple[float, int, None]]]:
    if generation.packed_lists and generation.output_top:
        return base64.b64encode(np.concatenate(generation.output_top).tobytes()).decode()
    return _triples([row.tolist() for row in generation.output_top])


def _triples(top: Sequence[Sequence[TokenLogprob]]) -> list[list[tuple[float, int, None]]]:
    return [[(logprob, token, None) for logprob, token in pairs] for pairs in top]

"""Adapts a vLLM server to SGLang's protocol: requests, weight versions and weight updates.

A request never straddles an update: a pause aborts running requests, returning their tokens so far, and the
gateway continues them in further requests. vLLM reports its weight version with every reply; during a load,
and after a failed one, the version is LOADING, which the gateway treats as unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import aiohttp

from tidegate.engine.requests.detokenizer import TokenDecoder
from tidegate.engine.requests.params import TokenLimits
from tidegate.engine.requests.request import HEALTH_REQUEST, Generation, WeightUpdate, parse_generate
from tidegate.engine.server.adapter import answer
from tidegate.engine.validation import RequestError
from tidegate.errors import EngineError
from tidegate.vllm.client import VLLMClient
from tidegate.vllm.model import ModelFiles, check_weights, manifest
from tidegate.vllm.process import VLLMOptions, VLLMProcess
from tidegate.vllm.translate import (
    refuse_unsupported,
    request_body,
    take,
    take_prompt,
    take_usage,
)
from tidegate.weights import delta_files

LOADING = "loading"
"""Version of weights that are missing or partly loaded."""


class EngineAdapter:
    """A vLLM server as an engine; call `start` first."""

    upstream: VLLMClient
    limits: TokenLimits
    pause_modes: tuple[str, ...] = ("abort", "retract")

    def __init__(self, options: VLLMOptions) -> None:
        self.options = options
        self.model = ModelFiles(options.model)
        self.process = VLLMProcess(options)
        self.paused = False
        self.version = LOADING
        """The weight version that vLLM reported last."""
        self._served = manifest(options.model)
        self._open = asyncio.Event()
        """Set unless vLLM is paused: it may answer new requests with 503 then."""
        self._open.set()
        self._pauses = 0
        self._running: dict[str, str] = {}
        """Running requests: the client's id by the id at vLLM."""
        self._names = itertools.count()
        self._loading = asyncio.Lock()
        self._tokenizer_hash: str | None = None
        self._whole = Path()
        """Directory of the version that was last rebuilt from differences."""

    async def start(self, stack: contextlib.AsyncExitStack) -> None:
        """Start vLLM and wait until it serves; closing `stack` stops it. Raises StartError."""
        # Validate the model directory before the start, which takes minutes.
        vocab_size, eos_ids = self.model.vocab_size, self.model.eos_ids
        text = await asyncio.to_thread(TokenDecoder.load, self.options.model)
        self._tokenizer_hash = text.tokenizer_hash
        self._whole = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-vllm-")))
        stack.push_async_callback(self.process.stop)
        url = await self.process.start()
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0)
        headers = {"Content-Type": "application/json"}
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector, headers=headers))
        self.upstream = VLLMClient(url, http)
        self.limits = TokenLimits(
            vocab_size, await self.upstream.max_context(), eos_ids | text.eos_ids, text.tokenizer is not None
        )
        await self._label(str(self.options.weight_version))

    # -- sampling

    def read(self, body: Mapping[str, Any]) -> Generation:
        """Parse a request. Raises RequestError that names the invalid or unsupported parameter."""
        generation = parse_generate(body, self.limits)
        refuse_unsupported(generation)
        return generation

    async def sample(self, generation: Generation) -> dict[str, Any]:
        """Return the complete reply. Cancelling aborts the request."""
        with self._named(generation) as name:
            replies = self._when_open(partial(self._whole_reply, request_body(generation, name)))
            async with contextlib.aclosing(replies):
                reply = await anext(replies)
        take_prompt(generation, reply.get("prompt_logprobs"))
        take(generation, reply["choices"][0])
        take_usage(generation, reply.get("usage"))
        return answer(generation, self.version)

    async def stream(self, generation: Generation) -> AsyncGenerator[dict[str, Any]]:
        """Yield cumulative replies. Closing the generator aborts the request."""
        with self._named(generation) as name:
            body = request_body(generation, name)
            async with contextlib.aclosing(self._when_open(partial(self.upstream.stream, body))) as pieces:
                async for piece in pieces:
                    take_usage(generation, piece.get("usage"))
                    for choice in piece["choices"]:
                        take(generation, choice)
                        if not generation.ended:
                            yield answer(generation, self.version)
        if not generation.ended:
            raise EngineError("vLLM's stream ended before the reply was complete", retryable=True)
        yield answer(generation, self.version)

    async def _when_open(
        self, call: Callable[[], AsyncGenerator[dict[str, Any]]]
    ) -> AsyncGenerator[dict[str, Any]]:
        """Yield the pieces of a reply. A request that a pause meets before its first piece is sent again."""
        while True:
            await self._open.wait()
            pauses, begun = self._pauses, False
            try:
                async with contextlib.aclosing(call()) as pieces:
                    async for piece in pieces:
                        begun = True
                        yield piece
                return
            except EngineError:
                if begun or pauses == self._pauses:
                    raise

    async def _whole_reply(self, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        yield await self.upstream.generate(body)

    @contextlib.contextmanager
    def _named(self, generation: Generation) -> Iterator[str]:
        """Register a request under an id that is unique at vLLM; clients may reuse ids."""
        name = f"{next(self._names)}-{generation.rid}"
        self._running[name] = generation.rid
        try:
            yield name
        finally:
            del self._running[name]

    async def abort(self, prefix: str) -> int:
        names = [name for name, rid in self._running.items() if rid.startswith(prefix)]
        await self.upstream.abort(names)
        return len(names)

    # -- control calls (`ControlledEngine`)

    async def pause(self, mode: str) -> None:
        """Abort running requests, returning their tokens so far; new ones wait until `resume`."""
        await self._pause("abort")
        self.paused = True

    async def resume(self) -> None:
        await self.upstream.resume()
        self.paused = False
        self._open.set()

    async def _pause(self, mode: Literal["abort", "wait"]) -> None:
        self._open.clear()
        self._pauses += 1
        try:
            await self.upstream.pause(mode)
        except EngineError:
            if not self.paused:
                self._open.set()
            raise

    async def load_weights(self, update: WeightUpdate) -> dict[str, Any]:
        """Load weights. Unless paused, running requests end first (with `abort_all`: at once).

        Raises WeightsError if the weights do not fit the model, and nothing is changed; EngineError if vLLM
        fails: the weights may be partly loaded, and the version stays LOADING.
        """
        if update.keep_cache:
            raise RequestError(
                "flush_cache = false: vLLM's cache does not record the weight versions of its entries; "
                "use true"
            )
        async with self._loading:
            directory = update.directory
            if delta_files.is_delta(directory):
                directory = self._whole / "weights"  # vLLM reads whole models
                await asyncio.to_thread(delta_files.materialise, update.directory, directory)
            await asyncio.to_thread(check_weights, directory, self._served, tied=self.model.tied)
            label = update.version or self.version
            if not self.paused:
                await self._pause("abort" if update.abort_all else "wait")
            try:
                await self._label(LOADING)
                await self.upstream.reload(directory)
                if not await self.upstream.reset_cache():
                    raise EngineError(
                        "vLLM did not reset its prefix cache after loading weights", retryable=True
                    )
                await self._label(label)
            finally:
                if not self.paused:  # also not since the load began
                    await self.resume()
        return {"weight_version": label}

    async def relabel(self, version: str) -> None:
        async with self._loading:
            await self._label(version)

    async def _label(self, version: str) -> None:
        await self.upstream.label(version)
        self.version = await self.upstream.version()
        if self.version != version:
            raise EngineError(
                f"vLLM reports weight version {self.version!r}, not {version!r} as set", retryable=True
            )

    async def info(self) -> dict[str, Any]:
        if not self._loading.locked():  # during a load, vLLM does not answer
            self.version = await self.upstream.version()
        path = str(self.options.model)
        return {
            "model_path": path,
            "tokenizer_path": path if self.limits.has_tokenizer else None,
            "tokenizer_hash": self._tokenizer_hash,
            "vocab_size": self.limits.vocab_size,
            "weight_version": self.version,
            "max_context": self.limits.max_context,
            "num_running": len(self._running),
        }

    async def flush(self) -> bool:
        return await self.upstream.reset_cache()

    async def check_health(self) -> None:
        await self.upstream.healthy()

    async def sample_one_token(self) -> None:
        await self.sample(self.read(HEALTH_REQUEST))

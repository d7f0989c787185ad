"""vLLM as an engine of SGLang's protocol: what is under way, what is live, and how the weights change.

A request never straddles an update: a pause aborts what runs, with the tokens so far, and the gateway goes on
from them in a further request. The label of the weights is vLLM's own, which it attests to every reply; while
weights are being loaded, and after a load that failed half-way, the label is no version.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp

from tidegate.engine.requests.detokenizer import TokenDecoder
from tidegate.engine.requests.params import TokenLimits
from tidegate.engine.requests.request import Generation, parse_generate
from tidegate.errors import EngineError
from tidegate.vllm import weights
from tidegate.vllm.client import VLLMClient
from tidegate.vllm.model import ModelFiles
from tidegate.vllm.options import VLLMOptions
from tidegate.vllm.process import VLLMProcess
from tidegate.vllm.translate import answer, refuse_unsupported, request_body, take, take_usage

LOADING = "loading"
"""The label of weights that are none or half."""


class EngineAdapter:
    """`start` it first; `process` is vLLM's."""

    upstream: VLLMClient
    limits: TokenLimits

    def __init__(self, options: VLLMOptions) -> None:
        self.options = options
        self.model = ModelFiles(options.model)
        self.process = VLLMProcess(options)
        self.paused = False
        self.version = LOADING
        """What vLLM attested last."""
        self._served = weights.manifest(options.model)
        self._live: dict[str, str] = {}
        """Requests under way: their ids at vLLM, and their own."""
        self._names = itertools.count()
        self._loading = asyncio.Lock()

    async def start(self, stack: contextlib.AsyncExitStack) -> None:
        """Start vLLM and wait until it serves; `stack` ends it. Raises StartError."""
        # What is wrong with the directory is said before minutes are spent.
        vocab_size, eos_ids = self.model.vocab_size, self.model.eos_ids
        text = await asyncio.to_thread(TokenDecoder.load, self.options.model)
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
        """Raises RequestError that names what is wrong, or what vLLM does not do."""
        generation = parse_generate(body, self.limits)
        refuse_unsupported(generation.params)
        return generation

    async def sample(self, generation: Generation) -> dict[str, Any]:
        """A whole reply. Cancelling it aborts the request."""
        with self._named(generation) as name:
            whole = await self.upstream.generate(request_body(generation, name))
        take(generation, whole["choices"][0])
        take_usage(generation, whole.get("usage"))
        return answer(generation, self.version)

    async def stream(self, generation: Generation) -> AsyncGenerator[dict[str, Any]]:
        """The reply so far, again and again. Closing it aborts the request."""
        with self._named(generation) as name:
            async with contextlib.aclosing(self.upstream.stream(request_body(generation, name))) as pieces:
                async for piece in pieces:
                    take_usage(generation, piece.get("usage"))
                    for choice in piece["choices"]:
                        take(generation, choice)
                        if not generation.ended:
                            yield answer(generation, self.version)
        if not generation.ended:
            raise EngineError("vLLM's stream ended before the reply did", retryable=True)
        yield answer(generation, self.version)

    @contextlib.contextmanager
    def _named(self, generation: Generation) -> Iterator[str]:
        """The request's id at vLLM, where two of one id would be mixed up."""
        name = f"{next(self._names)}-{generation.rid}"
        self._live[name] = generation.rid
        try:
            yield name
        finally:
            del self._live[name]

    async def abort(self, prefix: str) -> int:
        """End the requests whose ids begin so; returns how many."""
        names = [name for name, rid in self._live.items() if rid.startswith(prefix)]
        await self.upstream.abort(names)
        return len(names)

    @property
    def num_running(self) -> int:
        return len(self._live)

    # -- weights

    async def pause(self) -> None:
        """End what runs, with the tokens so far; what comes waits until `resume`."""
        await self.upstream.pause("abort")
        self.paused = True

    async def resume(self) -> None:
        await self.upstream.resume()
        self.paused = False

    async def load(self, directory: Path, version: str | None, *, abort: bool) -> str:
        """Make these weights live; unless paused, what runs ends first (`abort`: at once). Returns the label.

        Raises WeightsError where they are not this model's, and nothing was changed; EngineError where vLLM
        failed, which may have left the weights half loaded: nothing that it samples has a version then.
        """
        await asyncio.to_thread(weights.check, directory, self._served, tied=self.model.tied)
        async with self._loading:
            label = version or self.version
            paused = self.paused
            if not paused:
                await self.upstream.pause("abort" if abort else "wait")
            try:
                await self._label(LOADING)
                await self.upstream.reload(directory)
                if not await self.upstream.reset_cache():
                    raise EngineError("vLLM's prefix cache could not be emptied", retryable=True)
                await self._label(label)
            finally:
                if not paused:
                    await self.upstream.resume()
        return label

    async def relabel(self, version: str) -> None:
        async with self._loading:
            await self._label(version)

    async def _label(self, version: str) -> None:
        await self.upstream.label(version)
        self.version = await self.upstream.version()
        if self.version != version:
            raise EngineError(f"vLLM attests {self.version!r}, and was told {version!r}", retryable=True)

    async def attested(self) -> str:
        """The label that vLLM attests now; the last one while it loads, for then it answers nobody."""
        if not self._loading.locked():
            self.version = await self.upstream.version()
        return self.version

    async def flush(self) -> bool:
        """Whether the prefix cache is empty now."""
        return await self.upstream.reset_cache()

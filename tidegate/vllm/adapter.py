"""Adapts a vLLM server to SGLang's protocol: requests, weight versions and weight updates.

A request never straddles an update: a pause aborts running requests, returning their tokens so far, and the
gateway continues them in further requests. vLLM reports its weight version with every reply; during a load,
and after a failed one, the version is LOADING, which the gateway treats as unknown.

LoRA adapters are loaded beside the ones that requests use, under names with their version: the adapter of
version 12 is `v12`, one of several `v12-NAME`. vLLM's prefix cache keeps the blocks of each name apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
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
from tidegate.vllm.process import LORA, VLLMOptions, VLLMProcess
from tidegate.vllm.translate import (
    refuse_unsupported,
    request_body,
    take,
    take_prompt,
    take_usage,
)
from tidegate.weights import checksum, delta_files
from tidegate.weights.adapter_files import adapter_names, read_headers
from tidegate.weights.files import WeightsError, is_adapter

LOADING = "loading"
"""Version of weights that are missing or partly loaded."""
ABORTED: dict[str, Any] = {"token_ids": [], "logprobs": None, "finish_reason": "abort"}
"""vLLM's reply to a request that is aborted before its first token."""


class EngineAdapter:
    """A vLLM server as an engine; call `start` first."""

    upstream: VLLMClient
    limits: TokenLimits
    pause_modes: tuple[str, ...] = ("abort", "retract")

    def __init__(self, options: VLLMOptions) -> None:
        self.options = options
        self.model = ModelFiles(options.base)
        self.process = VLLMProcess(options)
        self.paused = False
        self.version = LOADING
        """The weight version that vLLM reported last."""
        self._served = manifest(options.base)
        self._adapters: dict[str, str] = {}
        """vLLM's names of the live version's LoRA adapters; the name of a single one is ""."""
        self._loaded: set[str] = set()
        """Adapters that vLLM may have, also of a version that could not be loaded as a whole."""
        self._sampled_by: dict[str, str] = {}
        """The adapter that each running request names."""
        self._base_checksum: int | None = None
        self._open = asyncio.Event()
        """Set unless vLLM is paused: it may answer new requests with 503 then."""
        self._open.set()
        self._pauses = 0
        self._running: dict[str, str] = {}
        """Running requests: the client's id by the id at vLLM."""
        self._waiting: dict[str, asyncio.Task[Literal[True]]] = {}
        """Those that wait until vLLM is open."""
        self._names = itertools.count()
        self._loading = asyncio.Lock()
        self._tokenizer_hash: str | None = None
        self._whole = Path()
        """Directory of the version that was last rebuilt from differences."""

    async def start(self, stack: contextlib.AsyncExitStack) -> None:
        """Start vLLM and wait until it serves; closing `stack` stops it. Raises StartError."""
        # Validate the model directory before the start, which takes minutes.
        vocab_size, eos_ids = self.model.vocab_size, self.model.eos_ids
        text = await asyncio.to_thread(TokenDecoder.load, self.options.base)
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
        label = str(self.options.weight_version)
        if is_adapter(self.options.model):
            self._adapters = await self._load_adapters(self.options.model, label)
        await self._label(label)

    # -- sampling

    def read(self, body: Mapping[str, Any]) -> Generation:
        """Parse a request. Raises RequestError that names the invalid or unsupported parameter."""
        generation = parse_generate(body, self.limits)
        refuse_unsupported(generation)
        return generation

    async def sample(self, generation: Generation) -> dict[str, Any]:
        """Return the complete reply. Cancelling aborts the request."""
        with self._named(generation) as name:
            replies = self._when_open(name, lambda: self._whole_reply(self._body(generation, name)))
            async with contextlib.aclosing(replies):
                reply = await anext(replies)
            take_prompt(generation, reply.get("prompt_logprobs"))
            self._take(generation, reply["choices"][0], name)
        take_usage(generation, reply.get("usage"))
        return answer(generation, self.version)

    async def stream(self, generation: Generation) -> AsyncGenerator[dict[str, Any]]:
        """Yield cumulative replies. Closing the generator aborts the request."""
        with self._named(generation) as name:
            replies = self._when_open(name, lambda: self.upstream.stream(self._body(generation, name)))
            async with contextlib.aclosing(replies) as pieces:
                async for piece in pieces:
                    take_usage(generation, piece.get("usage"))
                    for choice in piece["choices"]:
                        self._take(generation, choice, name)
                        if not generation.ended:
                            yield answer(generation, self.version)
        if not generation.ended:
            raise EngineError("vLLM's stream ended before the reply was complete", retryable=True)
        yield answer(generation, self.version)

    async def _when_open(
        self, name: str, call: Callable[[], AsyncGenerator[dict[str, Any]]]
    ) -> AsyncGenerator[dict[str, Any]]:
        """Yield the pieces of a reply. A request that a pause meets before its first piece is sent again."""
        while True:
            if not await self._wait_until_open(name):
                yield {"choices": [ABORTED]}
                return
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

    async def _wait_until_open(self, name: str) -> bool:
        """Wait while vLLM is paused; False if the request is aborted meanwhile."""
        if self._open.is_set():
            return True
        waiting = self._waiting[name] = asyncio.create_task(self._open.wait())
        try:
            await asyncio.wait([waiting])
            return not waiting.cancelled()
        finally:
            del self._waiting[name]
            waiting.cancel()

    async def _whole_reply(self, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        yield await self.upstream.generate(body)

    def _body(self, generation: Generation, name: str) -> dict[str, Any]:
        """Return the body of a request that is sent now: to the live version's adapter, if it has any."""
        wanted = generation.adapter
        if wanted and wanted not in self._adapters:
            raise RequestError(f"lora_path = {wanted!r}: version {self.version} has no such adapter")
        adapter = self._adapters.get(wanted)
        if adapter is not None:
            self._sampled_by[name] = adapter
        return request_body(generation, name, adapter)

    def _take(self, generation: Generation, choice: Mapping[str, Any], name: str) -> None:
        """Add the tokens of a reply or of a piece; their version is that of the adapter that was named.

        vLLM reports its label, though it may keep a request through a pause and load that adapter again.
        """
        take(generation, choice)
        adapter = self._sampled_by.get(name)
        if adapter is not None and generation.spans:
            version = adapter.partition("-")[0].removeprefix("v")
            generation.spans = [(version, 0, len(generation.output_ids))]

    @contextlib.contextmanager
    def _named(self, generation: Generation) -> Iterator[str]:
        """Register a request under an id that is unique at vLLM; clients may reuse ids."""
        name = f"{next(self._names)}-{generation.rid}"
        self._running[name] = generation.rid
        try:
            yield name
        finally:
            del self._running[name]
            self._sampled_by.pop(name, None)

    async def abort(self, prefix: str) -> int:
        names = [name for name, rid in self._running.items() if rid.startswith(prefix)]
        waiting = [name for name in names if name in self._waiting]
        for name in waiting:  # vLLM does not have it
            self._waiting[name].cancel()
        await self.upstream.abort([name for name in names if name not in waiting])
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
            label, adapters = update.version or self.version, dict[str, str]()
            if self.options.serves_adapters:
                adapters = await self._load_adapters(update.directory, label)
            else:
                directory = await asyncio.to_thread(self._checked, update.directory)
            if not self.paused:
                # The trainer does not pause an engine that loads adapters (`staged`).
                await self._pause("abort" if adapters or update.abort_all else "wait")
            try:
                if adapters:  # no request uses the ones before any more
                    self._adapters = adapters
                    await self._unload_all_but(adapters.values())
                else:
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

    def _checked(self, directory: Path) -> Path:
        """Return a directory of whole weights that fit the model. Raises WeightsError."""
        if delta_files.is_delta(directory):
            delta_files.materialise(directory, self._whole / "weights")  # vLLM reads whole models
            directory = self._whole / "weights"
        check_weights(directory, self._served, self.model)
        return directory

    async def _load_adapters(self, directory: Path, label: str) -> dict[str, str]:
        """Load a version's LoRA adapters beside the live ones, while requests run; return vLLM's names."""
        if not self.options.serves_adapters or not is_adapter(directory):
            what = "a LoRA adapter" if is_adapter(directory) else "no LoRA adapter"
            raise WeightsError(
                f"{directory} holds {what}: vLLM loads adapters if it is started with {LORA}, and then "
                "nothing else"
            )
        headers = await asyncio.to_thread(read_headers, directory)
        if self._base_checksum is None:  # once, as it reads the whole model
            self._base_checksum = await asyncio.to_thread(checksum.of_files, self.options.base)
        for header in headers.values():
            if header.base_checksum not in (None, self._base_checksum):
                raise WeightsError(
                    f"{header.directory}: its base model {header.base} has the checksum "
                    f"{header.base_checksum}, the served one, {self.options.base}, {self._base_checksum}: "
                    "start vLLM with the adapter's base model"
                )
        names = adapter_names(label, headers)
        live, new = set(self._adapters.values()), set(names.values())
        with self._requests_wait() if live & new else contextlib.nullcontext():
            # vLLM refuses to load a name that it has, as after a lost answer. Its slots are for two versions;
            # for others it would evict adapters that requests use.
            await self._unload_all_but(live - new)
            for name, header in headers.items():
                self._loaded.add(names[name])  # first: the answer may be lost
                await self.upstream.load_adapter(names[name], header.directory)
        return names

    @contextlib.contextmanager
    def _requests_wait(self) -> Iterator[None]:
        """Keeps new requests here; those that vLLM has refused meanwhile are sent again."""
        self._open.clear()
        self._pauses += 1
        try:
            yield
        finally:
            if not self.paused:
                self._open.set()

    async def _unload_all_but(self, names: Iterable[str]) -> None:
        for name in self._loaded.difference(names):
            try:
                await self.upstream.unload_adapter(name)
            except EngineError as error:  # vLLM refuses (404) to unload what it lacks
                if error.retryable:
                    raise
            self._loaded.discard(name)

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
        path = str(self.options.base)
        return {
            "model_path": path,
            "tokenizer_path": path if self.limits.has_tokenizer else None,
            "tokenizer_hash": self._tokenizer_hash,
            "vocab_size": self.limits.vocab_size,
            "weight_version": self.version,
            "adapters": self.options.serves_adapters,
            "staged": self.options.serves_adapters,
            "max_context": self.limits.max_context,
            "num_running": len(self._running),
        }

    async def flush(self) -> bool:
        return await self.upstream.reset_cache()

    async def check_health(self) -> None:
        await self.upstream.healthy()

    async def sample_one_token(self) -> None:
        await self.sample(self.read(HEALTH_REQUEST))

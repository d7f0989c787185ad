"""The embedded engine: assembles model, detokenizer and scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from tidegate.engine.model.model import Model, load_model
from tidegate.engine.options import EngineOptions
from tidegate.engine.requests.detokenizer import TokenDecoder
from tidegate.engine.requests.grammar import Grammars
from tidegate.engine.requests.params import TokenLimits
from tidegate.engine.requests.request import HEALTH_REQUEST, Generation, WeightUpdate, parse_generate
from tidegate.engine.scheduling.scheduler import PAUSE_MODES, Scheduler
from tidegate.engine.weights.loading import CheckedWeights
from tidegate.engine.weights.receiver import WeightsReceiver
from tidegate.errors import EngineError
from tidegate.weights.adapter_files import base_directory

T = TypeVar("T")


class Engine:
    """One embedded engine; `start` binds it to the event loop that serves its requests."""

    pause_modes = PAUSE_MODES

    def __init__(self, options: EngineOptions, model: Model, detokenizer: TokenDecoder) -> None:
        self.options = options
        self.model = model
        self.detokenizer = detokenizer
        self.limits = TokenLimits(
            model.vocab_size,
            options.max_context,
            model.eos_ids | detokenizer.eos_ids,
            detokenizer.tokenizer is not None,
        )
        self.tokenizer_hash = detokenizer.tokenizer_hash
        self.grammars = Grammars(detokenizer.tokenizer, model.vocab_size, self.limits.eos_ids)
        self.loading = asyncio.Lock()
        self.receiver = WeightsReceiver(model.device)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_failure: Callable[[], None] = lambda: None
        self.scheduler = Scheduler(
            model,
            max_slots=options.max_slots,
            version=str(options.weight_version),
            prefix_bytes=options.prefix_cache_mb * 2**20,
            deliver=self._deliver,
            matched_stop=detokenizer.matched_stop,
            on_failure=lambda: self._on_failure(),
        )

    @classmethod
    def load(cls, options: EngineOptions) -> Engine:
        model = load_model(options)
        options = replace(options, model=base_directory(options.model))
        return cls(options, model, TokenDecoder.load(options.model))

    def start(self, on_failure: Callable[[], None] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        if on_failure is not None:
            self._on_failure = on_failure
        self.scheduler.start()

    async def call(self, action: Callable[[], T]) -> T:
        """Runs a function between two steps; raises its exception, or EngineError."""
        return await asyncio.wrap_future(self.scheduler.call(action))

    # -- control calls (`ControlledEngine`)

    @property
    def paused(self) -> str | None:
        return self.scheduler.paused

    async def abort(self, prefix: str) -> int:
        return await self.call(lambda: self.scheduler.abort(prefix))

    async def pause(self, mode: str) -> None:
        await self.call(lambda: self.scheduler.pause(mode))

    async def resume(self) -> None:
        await self.call(self.scheduler.resume)

    async def load_weights(self, update: WeightUpdate) -> dict[str, Any]:
        """Reads and checks weights while requests run, then loads them; returns the fields of the reply."""
        read = partial(self.model.read_weights, update.directory)
        async with self.loading:
            # transformers changes torch's default dtype for all threads while it builds a model.
            converts = self.model.converts_weights
            weights = await (self.call(read) if converts else asyncio.to_thread(read))
            return await self.load_checked(weights, update.version, update.keep_cache, update.abort_all)

    async def load_checked(
        self, weights: CheckedWeights, version: str | None, keep_cache: bool, abort_all: bool = False
    ) -> dict[str, Any]:
        """Loads checked weights; returns what the reply reports. The caller holds `loading`."""
        in_flight = await self.call(
            lambda: self.scheduler.load(weights, version, keep_cache=keep_cache, abort_all=abort_all)
        )
        return {"num_paused_requests": in_flight, "weight_version": self.scheduler.version}

    async def relabel(self, version: str) -> None:
        await self.call(lambda: self.scheduler.relabel(version))

    async def flush(self) -> bool:
        return await self.call(self.scheduler.flush)

    async def info(self) -> dict[str, Any]:
        path = str(self.options.model)
        return {
            "model_path": path,
            "tokenizer_path": path if self.limits.has_tokenizer else None,
            "tokenizer_hash": self.tokenizer_hash,
            "vocab_size": self.limits.vocab_size,
            "weight_version": self.scheduler.version,
            "staged": True,  # weights are read while requests run, and loaded between two steps
            "adapters": True,  # LoRA adapters are loaded like weights, and applied unmerged
            "max_context": self.options.max_context,
            "max_slots": self.options.max_slots,
            "num_running": self.scheduler.num_running,
            "num_waiting": self.scheduler.num_waiting,
            **self.scheduler.totals(),
        }

    async def check_health(self) -> None:
        if self.scheduler.failure is not None:
            raise EngineError(f"the scheduler failed: {self.scheduler.failure!r}", retryable=True)

    async def sample_one_token(self) -> None:
        generation = parse_generate(HEALTH_REQUEST, self.limits)
        generation.wake = asyncio.Event()
        self.scheduler.submit(generation)
        try:
            await generation.wake.wait()
        finally:
            self.abort_unfinished([generation])
        if generation.error is not None:
            raise EngineError(generation.error, retryable=True)

    def abort_unfinished(self, generations: Sequence[Generation]) -> None:
        with suppress(EngineError):  # the scheduler failed and has ended all requests
            for generation in generations:
                if not generation.ended:
                    self.scheduler.call(partial(self.scheduler.abort_one, generation))

    def _deliver(self, generations: list[Generation]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            assert self._loop is not None
            self._loop.call_soon_threadsafe(_wake, generations)


def _wake(generations: list[Generation]) -> None:
    for generation in generations:
        if generation.wake is not None:
            generation.wake.set()

"""The embedded engine: assembles model, detokenizer and scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from tidegate.engine.model.model import Model, load_model
from tidegate.engine.options import EngineOptions
from tidegate.engine.requests.detokenizer import TokenDecoder
from tidegate.engine.requests.grammar import Grammars
from tidegate.engine.requests.params import TokenLimits
from tidegate.engine.requests.request import Generation
from tidegate.engine.scheduling.scheduler import Scheduler
from tidegate.engine.weights.loading import CheckedWeights
from tidegate.engine.weights.receiver import WeightsReceiver

T = TypeVar("T")


class Engine:
    """One embedded engine; `start` binds it to the event loop that serves its requests."""

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
        """Loads model and tokenizer. Raises StartError."""
        return cls(options, load_model(options), TokenDecoder.load(options.model))

    def start(self, on_failure: Callable[[], None] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        if on_failure is not None:
            self._on_failure = on_failure
        self.scheduler.start()

    async def call(self, action: Callable[[], T]) -> T:
        """Runs a function between two steps; raises its exception, or EngineError."""
        return await asyncio.wrap_future(self.scheduler.call(action))

    async def read_weights(self, directory: Path) -> CheckedWeights:
        """Reads and checks weights while requests run. Raises WeightsError or EngineError."""
        read = partial(self.model.read_weights, directory)
        if self.model.converts_weights:
            # transformers changes torch's default dtype for all threads while it builds a model.
            return await self.call(read)
        return await asyncio.to_thread(read)

    def _deliver(self, generations: list[Generation]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            assert self._loop is not None
            self._loop.call_soon_threadsafe(_wake, generations)


def _wake(generations: list[Generation]) -> None:
    for generation in generations:
        if generation.wake is not None:
            generation.wake.set()

"""The engine's parts put together: model, text, scheduler."""

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
    """Made in any thread; `start` binds it to the event loop that serves its requests."""

    def __init__(self, options: EngineOptions, model: Model, text: TokenDecoder) -> None:
        self.options = options
        self.model = model
        self.text = text
        self.limits = TokenLimits(
            model.vocab_size, options.max_context, model.eos_ids | text.eos_ids, text.tokenizer is not None
        )
        self.grammars = Grammars(text.tokenizer, model.vocab_size, self.limits.eos_ids)
        self.loading = asyncio.Lock()
        self.receiver = WeightsReceiver(model.device)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_death: Callable[[], None] = lambda: None
        self.scheduler = Scheduler(
            model,
            max_slots=options.max_slots,
            version=str(options.weight_version),
            prefix_bytes=options.prefix_cache_mb * 2**20,
            deliver=self._deliver,
            finds_stop=text.finds_stop,
            on_death=lambda: self._on_death(),
        )

    @classmethod
    def load(cls, options: EngineOptions) -> Engine:
        """Raises StartError."""
        return cls(options, load_model(options), TokenDecoder.load(options.model))

    def start(self, on_death: Callable[[], None] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        if on_death is not None:
            self._on_death = on_death
        self.scheduler.start()

    async def call(self, action: Callable[[], T]) -> T:
        """Run something between two steps; raises what it raises, or EngineError."""
        return await asyncio.wrap_future(self.scheduler.call(action))

    async def read_weights(self, directory: Path) -> CheckedWeights:
        """Read and check weights while requests run; raises WeightsError, or EngineError."""
        read = partial(self.model.read_weights, directory)
        if self.model.converts_weights:
            # transformers sets torch's default type for all threads while it builds a model.
            return await self.call(read)
        return await asyncio.to_thread(read)

    def _deliver(self, generations: list[Generation]) -> None:
        # A closed loop has no one left to tell.
        with suppress(RuntimeError):
            assert self._loop is not None
            self._loop.call_soon_threadsafe(_wake, generations)


def _wake(generations: list[Generation]) -> None:
    for generation in generations:
        if generation.wake is not None:
            generation.wake.set()

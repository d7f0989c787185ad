"""The training loop, on one screen: lease → advantage → loss → step → publish."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tidegate.config import TrainerSettings
from tidegate.errors import TrainingError
from tidegate.trainer.admission.core import Admission
from tidegate.trainer.batch.batcher import Batch, Batcher
from tidegate.trainer.batch.credit import Credit
from tidegate.trainer.policy.policy import Learner
from tidegate.trainer.publish.publisher import Publisher
from tidegate.trainer.records.recorder import Recorder

T = TypeVar("T")
MAX_SKIPPED = 3
CHANGED = -2
"""Stands for the version of weights that were not published yet: no token was sampled from them."""


@dataclass(slots=True)
class Loop:
    """Owns nothing but the order of things; each component is handed what it needs and knows no loop."""

    settings: TrainerSettings
    admission: Admission
    batches: Batcher
    policy: Learner
    publisher: Publisher
    recorder: Recorder
    checkpoint: Callable[[int], Awaitable[object]]
    evaluate: Callable[[int], Awaitable[dict[str, float]]]
    credit: Credit
    step: int = 0
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    skipped: int = 0

    async def run(self) -> None:
        """Train until `settings.steps`, or until `stop` is set and the step in hand is done."""
        while self.step < self.settings.steps:
            began = time.monotonic()
            parts = await self._gather()
            if parts is None:
                return
            with self._line(began) as metrics:
                await whole(self._train(parts, metrics))
                if self.skipped:
                    continue
                if self.settings.publishes(self.step):
                    metrics["time/publish"] = await self._publish()
                metrics |= await self.evaluate(self.step)
            if self.step % self.settings.checkpoint_every == 0:
                await whole(self.checkpoint(self.step))

    @contextlib.contextmanager
    def _line(self, began: float) -> Iterator[dict[str, float]]:
        """The metrics of the step that is taken meanwhile. It has its line also where the run ends before the
        next one, for it is committed then; a step that is skipped has none."""
        metrics: dict[str, float] = {}
        try:
            yield metrics
        finally:
            if metrics:
                metrics["time/step"] = time.monotonic() - began
                self.recorder.step(self.step, metrics)

    async def _gather(self) -> list[Batch] | None:
        """Cut the next batch; None when it is time to stop. When streaming it comes in minibatches, and each
        but the last is learned from before the next one is waited for."""
        parts: list[Batch] = []
        for number in self.settings.cuts:
            if parts:
                await whole(self._learn(parts[-1]))
            part = await unless(self.stop, self.batches.next(number))
            if part is None:
                return None
            part.advantages = self.credit(part.groups)
            parts.append(part)
        return parts

    async def _learn(self, part: Batch) -> None:
        fresh = self.step == 0 or self.settings.publishes(self.step)
        version = self.admission.version if fresh else CHANGED
        await asyncio.to_thread(self.policy.add, part.rows(), version)

    async def _train(self, parts: list[Batch], metrics: dict[str, float]) -> None:
        """One optimiser step, entered in the ledger as soon as it is done; `metrics` is told what it was."""
        await self._learn(parts[-1])
        found = await asyncio.to_thread(self.policy.finish)
        batch = Batch.of(parts)
        self.skipped = self.skipped + 1 if found["skipped"] else 0
        if self.skipped:
            await self._skip(batch)
            return
        self.step += 1
        self.recorder.batch(batch, self.step)
        metrics |= self.recorder.batch_metrics(batch, self.step) | found
        await self.batches.stepped(batch, self.step)

    async def _skip(self, batch: Batch) -> None:
        groups = ", ".join(self.policy.non_finite)
        await self.batches.skip(batch)
        self.recorder.note(f"a loss or gradient was not finite, the step is skipped; groups: {groups}")
        if self.skipped >= MAX_SKIPPED:
            raise TrainingError(
                f"{MAX_SKIPPED} steps in a row had a loss or gradient that is not finite; the last groups: "
                f"{groups}. Lower trainer.learning_rate, or look at these groups' trajectories"
            )

    async def _publish(self) -> float:
        began = time.monotonic()
        version = self.admission.publishing(self.step)
        await self.publisher.publish(version)
        self.admission.publish(version)
        self.batches.freed()
        return time.monotonic() - began


async def unless(stop: asyncio.Event, waited: Coroutine[Any, Any, T]) -> T | None:
    """What is waited for, or None if `stop` comes first (the wait is cancelled then)."""
    work, stopped = asyncio.create_task(waited), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([work, stopped], return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        for task in (work, stopped):
            task.cancel()
        await asyncio.gather(work, stopped, return_exceptions=True)


async def whole(indivisible: Awaitable[T]) -> T:
    """Run something to its end even if the caller is cancelled meanwhile; then be cancelled."""
    task = asyncio.ensure_future(indivisible)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if (error := task.exception()) is not None:
            raise error from None
        raise

"""Evaluations that run during training (`eval.beside_training`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from tidegate.errors import GatewayError
from tidegate.trainer.publish.candidate_engines import CandidateEngines
from tidegate.trainer.publish.engines import EngineMembership
from tidegate.trainer.publish.publisher import Publisher
from tidegate.trainer.rollout.evaluator import Evaluation

RELEASE_S, RETRY_S = 120.0, 1.0


@dataclass(frozen=True, slots=True)
class Evaluated:
    """An evaluation that ended, and what it evaluated."""

    step: int
    version: int
    weights: Path
    evaluation: Evaluation


@dataclass(slots=True, kw_only=True)
class BackgroundEvaluation:
    """Runs one evaluation at a time in the background.

    `reserved_engines` keep the evaluated version: they get no publish, and no calls of training. Without such
    engines, publishes wait for the evaluation before it spans more than `max_versions` versions.

    Args:
        evaluate: Step, and the pinned version or None → the evaluation, None if none is due.
        publisher: Publishes versions; keeps the evaluated weights until the evaluation ended.
        engines: The run's engines.
        reserved_engines: Reserves engines for evaluations; None: no version is pinned.
        max_versions: Versions that an evaluation may sample from if none is pinned.
        note: Receives messages.

    Attributes:
        pinned: Whether the running evaluation has engines of its own.
    """

    evaluate: Callable[[int, int | None], Awaitable[Evaluation | None]]
    publisher: Publisher
    engines: EngineMembership
    reserved_engines: CandidateEngines | None
    max_versions: int
    note: Callable[[str], None]
    pinned: bool = False
    _version: int = 0
    _task: asyncio.Task[Evaluated | None] | None = field(default=None)

    async def start(self, step: int) -> None:
        """Begin the evaluation of the live version. The previous one must have been collected."""
        assert self._task is None, "an evaluation runs"
        weights, version = self.publisher.current
        # Before the first await: a publish meanwhile would remove the weights that are evaluated.
        self.publisher.kept, self._version = weights, version
        await self.publisher.files()
        self.pinned = await self._pin(weights, version)
        self._task = asyncio.create_task(self._run(step, version, weights), name=f"evaluation {step}")

    async def collect(self, *, wait: bool) -> Evaluated | None:
        """Return the evaluation that ended since, if any; with `wait`, wait for the one that runs."""
        if self._task is None or not (wait or self._task.done()):
            return None
        # `wait`, as a cancelled caller must not cancel the evaluation.
        await asyncio.wait([self._task])
        task, self._task = self._task, None
        self.publisher.kept = None
        return task.result()

    async def before_publish(self, version: int) -> None:
        """Wait while the publish of `version` would have the evaluation span too many versions."""
        if self._task is not None and not self.pinned and version - self._version >= self.max_versions:
            await asyncio.wait([self._task])  # it has a deadline

    async def close(self) -> None:
        """Cancel the evaluation that runs."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, step: int, version: int, weights: Path) -> Evaluated | None:
        try:
            evaluation = await self.evaluate(step, version if self.pinned else None)
        finally:
            if self.pinned:
                await self._release()
        return None if evaluation is None else Evaluated(step, version, weights, evaluation)

    async def _pin(self, weights: Path, version: int) -> bool:
        """Have engines keep the version; returns whether they do. Otherwise they return to service."""
        if self.reserved_engines is None:
            return False
        try:
            held = await self.reserved_engines.ensure_serving(weights, version)
        except GatewayError as error:
            self.note(f"no engine can be reserved for the evaluation: {error}")
            held = False
        if held:
            self.engines.pinned |= self.engines.reserved
            return True
        self.note(f"too few engines are in service to pin the evaluation to version {version}")
        await self._release()
        return False

    async def _release(self) -> None:
        """Return the engines to service. Raises GatewayError if the gateway is away for RELEASE_S."""
        self.engines.pinned.clear()
        deadline = time.monotonic() + RELEASE_S
        while self.reserved_engines is not None:
            try:
                await self.reserved_engines.release()
                return
            except GatewayError:  # it is restarting
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(RETRY_S)

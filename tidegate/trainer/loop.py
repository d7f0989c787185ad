"""Training loop: lease → advantage → loss → step → publish."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

from tidegate.config import TrainerSettings
from tidegate.errors import TrainingError
from tidegate.trainer.admission.core import Admission
from tidegate.trainer.batch.batcher import Batch, Batcher
from tidegate.trainer.batch.credit import BaselineCredit, CreditAssignment
from tidegate.trainer.policy.protocol import TrainedPolicy
from tidegate.trainer.publish.promotion import Promotion
from tidegate.trainer.publish.publisher import Publisher
from tidegate.trainer.records.recorder import Recorder
from tidegate.trainer.waits import run_to_completion, unless_stopped

MAX_SKIPPED_STEPS = 3
UNPUBLISHED_VERSION = -2
"""Version of weights that are not published. No token was sampled from them, so that `mismatch_kl` has no
tokens."""


@dataclass(slots=True, kw_only=True)
class Loop:
    """Defines only the order of operations. Components are injected and never reference the loop."""

    settings: TrainerSettings
    admission: Admission
    batches: Batcher
    policy: TrainedPolicy
    publisher: Publisher
    recorder: Recorder
    checkpoint: Callable[[int], Awaitable[object]]
    evaluate: Callable[[int, bool], Awaitable[dict[str, float]]]
    """Step, whether it is the last one → metrics."""
    credit: CreditAssignment
    before_publish: Callable[[int], Awaitable[None]]
    """Waits until a version may be published."""
    promotion: Promotion | None = None
    """Tests versions before they go live; None: all do."""
    roll_back: Callable[[], Awaitable[object]] | None = None
    """Carries out a requested roll-back, between steps."""
    requested: Callable[[], bool] = lambda: False
    """Whether there is such a request."""
    step: int = 0
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    skipped: int = 0
    committable: bool = True
    """The weights are complete and those after `step` steps, all of which the ledger has: a checkpoint may be
    written."""

    @property
    def solved(self) -> str | None:
        """Why nothing is left to learn; None if something may be. Clients' groups may become harder again."""
        return None if self.batches.clients_form_groups else self.admission.streaks.solved_reason()

    async def run(self) -> None:
        """Train until `trainer.steps`, until an evaluation reaches `trainer.until`, until nothing is left to
        learn, or until `stop` is set and the current step is finished."""
        while self.step < self.settings.steps:
            if self.roll_back is not None and self.requested():
                await run_to_completion(self.roll_back())
            began = time.monotonic()
            parts = await self._next_batch()
            if parts is None and self.solved is not None and not self.stop.is_set():
                interval = self.settings.publish_interval
                # Engines sample the last evaluation, and may still have the weights of an earlier step.
                if isinstance(interval, int) and self.step % interval:
                    await self._publish()
                if evaluated := await self.evaluate(self.step, True):
                    await run_to_completion(self.recorder.evaluated(evaluated))
                return
            if parts is None and not self.stop.is_set():
                continue
            if parts is None:
                return
            async with self._metrics_line(began) as metrics:
                # A cancellation between the optimiser's step and its ledger entry would leave weights that no
                # checkpoint may hold.
                await run_to_completion(self._train(parts, metrics))
                # No weight has changed: there is nothing to publish, to evaluate or to save.
                if self.skipped:
                    continue
                if self.settings.is_publish_step(self.step):
                    metrics |= await self._publish()
                metrics |= await self.evaluate(self.step, self.step == self.settings.steps)
            # The next candidate may be rolled back to this step, so its weights need a checkpoint.
            tested = self.promotion is not None and self.promotion.live_step == self.step
            if tested or self.step % self.settings.checkpoint_every == 0:
                await run_to_completion(self.checkpoint(self.step))
            if self.settings.reached(metrics):
                return

    @contextlib.asynccontextmanager
    async def _metrics_line(self, began: float) -> AsyncIterator[dict[str, float]]:
        """Record the metrics of the step in the `async with` block, even if it raises.

        A skipped step has none. Another one is committed even if the run ends during its publish or
        evaluation, so it needs its line.
        """
        metrics: dict[str, float] = {}
        try:
            yield metrics
        finally:
            if metrics:
                metrics["time/step"] = time.monotonic() - began
                await run_to_completion(self.recorder.step(self.step, metrics))

    async def _next_batch(self) -> list[Batch] | None:
        """Wait for the next batch; None if the run stops first, or `_interrupted` becomes true.

        A streamed batch comes in minibatches; gradients of each are accumulated before waiting for the next.
        """
        parts: list[Batch] = []
        for number in self.settings.part_sizes:
            if parts:
                await run_to_completion(self._backward(parts[-1]))
            wait = self.batches.next_batch(number, partial(self._interrupted, begun=bool(parts)))
            part = await unless_stopped(self.stop, wait)
            if part is None:
                return None
            part.advantages = self.credit(part.groups)
            parts.append(part)
        return parts

    def _interrupted(self, *, begun: bool) -> bool:
        """Return whether to wait for no more groups. A roll-back is carried out between steps."""
        # A begun batch has gradients of the current weights: another policy could not go on with them.
        return self.solved is not None or (not begun and self.requested())

    async def _backward(self, part: Batch) -> None:
        """Train on a minibatch, with the version of the current weights: UNPUBLISHED_VERSION if no engine has
        sampled from them."""
        published = self.step == 0 or self.settings.is_publish_step(self.step)
        version = self.admission.version if published else UNPUBLISHED_VERSION
        await asyncio.to_thread(self.policy.backward, part.rows(), version)

    async def _train(self, parts: list[Batch], metrics: dict[str, float]) -> None:
        """Take the batch's last optimiser step, record the step in the ledger, and add its metrics."""
        self.committable = False
        async with self.batches.filtering():
            await self._backward(parts[-1])
            update = await asyncio.to_thread(self.policy.optimizer_step)
        batch = Batch.of(parts)
        self.skipped = self.skipped + 1 if update["skipped"] else 0
        every = [group.id for group in batch.groups]
        batch = batch.without(every if self.skipped else self.policy.untrained)
        if batch.untrained:
            groups = ", ".join(self.policy.non_finite)
            self.recorder.note(f"skipped a step whose loss or gradient was not finite; groups: {groups}")
        if self.skipped:
            await self._skip(batch)
            return
        step = self.step + 1
        # Before the ledger has the step: a resume that undoes the step takes its groups' tokens from this
        # file.
        await self.recorder.batch(batch, step)
        more = self.recorder.batch_metrics(batch, step) | update
        self.batches.record_step(batch, step)
        self.step, self.committable = step, True
        # Only now: `_metrics_line` writes the line as soon as there are metrics, and the audit refuses a line
        # of a step that the ledger lacks.
        metrics |= more
        # After the ledger has the step: the gateway does not deliver an acknowledged group again.
        await self.batches.end_trained(batch, step)

    async def _skip(self, batch: Batch) -> None:
        if isinstance(self.credit, BaselineCredit):  # the baselines are those of the steps that were taken
            self.credit.means.uncount()
        self.committable = True  # no weight has changed
        await self.batches.end_untrained(batch)
        if self.skipped >= MAX_SKIPPED_STEPS:
            raise TrainingError(
                f"{MAX_SKIPPED_STEPS} steps in a row had a loss or gradient that is not finite; the last "
                f"groups: {', '.join(self.policy.non_finite)}. Lower trainer.learning_rate, or inspect these "
                "groups' trajectories"
            )

    async def _publish(self) -> dict[str, float]:
        began = time.monotonic()
        await self.before_publish(self.admission.version + 1)
        opened = time.monotonic()
        if self.promotion is not None:
            metrics = await self.promotion.publish(self.step)
        else:
            version = self.admission.versions.reserve(self.step)
            await self.publisher.publish(version)
            self.admission.mark_live(version)
            metrics = {"time/publish": time.monotonic() - opened}
        # The step's groups count towards the capacity until their version is live.
        self.batches.on_freed()
        return metrics | {"time/publish_gate": opened - began}

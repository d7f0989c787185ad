"""The checkpoints of a run: what they hold, when they are written, and the return to one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidegate.trainer.admission.core import Admission
from tidegate.trainer.batch.credit import RunningMeans
from tidegate.trainer.checkpoint import checkpoint as checkpoints
from tidegate.trainer.ledger.ledger import Ledger
from tidegate.trainer.policy.protocol import TrainedPolicy
from tidegate.trainer.processes.supervisor import TaskSupervisor
from tidegate.trainer.publish.promotion import Promotion
from tidegate.trainer.publish.publisher import Publisher
from tidegate.trainer.start import Start
from tidegate.trainer.waits import run_to_completion


@dataclass(slots=True, kw_only=True)
class RunCheckpoints:
    """Writes and loads checkpoints of a run.

    Args:
        run_dir: Directory of the run.
        start: Where the run started; its checkpoint stays as long as engines may load it.
        policy: The trained policy.
        admission: Admission of the run.
        ledger: Ledger of the run.
        means: Running means of rewards, which a checkpoint restores.
        publisher: Has the live weights.
        promotion: Tests versions before they go live; its live step is kept. None: all go live.
        supervisor: Ends the run if a checkpoint in the background fails.
        keep: Number of checkpoints that are kept (`trainer.keep_checkpoints`).
    """

    run_dir: Path
    start: Start
    policy: TrainedPolicy
    admission: Admission
    ledger: Ledger
    means: RunningMeans
    publisher: Publisher
    promotion: Promotion | None
    supervisor: TaskSupervisor
    keep: int
    newest: asyncio.Task[None] | None = None
    """The newest checkpoint's writing."""

    async def write(self, step: int, *, background: bool = False) -> None:
        """Write a checkpoint, the commit point of all steps so far.

        In the background it is written after this returns, and a failure ends the run. The policy is copied
        before, and the previous checkpoint has been written.
        """
        await self.written()
        # Read without an await between: groups go on, and their later entries belong to the next marker.
        state: dict[str, Any] = {
            "ledger": self.ledger.position,
            "ledger_checksum": self.ledger.checksum,
            "epoch": self.admission.epoch,
            "version": self.admission.version,
            "baseline": self.means.state(),
            **self.admission.progress(),
        }
        if self.promotion is not None:
            state["live_step"] = self.promotion.live_step
        # The marker commits the ledger up to `position`, so these entries reach the disk first.
        await self.ledger.durable()
        stepped = self.admission.stepped()
        write = await asyncio.to_thread(checkpoints.begin, self.run_dir, step, self.policy, state)
        self.newest = self.supervisor.watch(self._write(write, stepped), f"checkpoint of step {step}")
        if not background:
            await self.newest

    async def _write(self, write: Callable[[], object], stepped: tuple[int, int]) -> None:
        await asyncio.to_thread(write)
        self.admission.commit(stepped)
        protected = set() if self.promotion is None else {self.promotion.live_step or 0}
        # Until the first publish after a resume, engines serve and load the weights in its checkpoint.
        used = (self.publisher.current[0], self.publisher.kept)
        if self.start.weights in used and self.start.checkpoint is not None:
            protected.add(checkpoints.live(self.run_dir, self.start.checkpoint).step)
        await asyncio.to_thread(checkpoints.prune, self.run_dir, self.keep, protected)

    async def written(self) -> None:
        """Wait until the newest checkpoint is written or has failed, which ends the run."""
        if self.newest is not None:
            await asyncio.wait([self.newest])

    async def read(self, step: int) -> checkpoints.Checkpoint:
        """Return the checkpoint of a step, once the newest one is written."""
        await self.written()
        return checkpoints.read(checkpoints.committed(self.run_dir)[step])

    async def load(self, checkpoint: checkpoints.Checkpoint) -> None:
        """Return the policy and its optimiser to a checkpoint. A cancellation waits for the loading."""
        await run_to_completion(asyncio.to_thread(checkpoints.load, checkpoint, self.policy))
        self.means.restore(checkpoint.state.get("baseline", {}))

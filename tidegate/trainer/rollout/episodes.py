"""Runs one episode: opens its session, lets an agent run it, finishes it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tidegate.gateway.client import GatewayClient, SessionSummary
from tidegate.trainer.processes.agent_pool import AgentRunner
from tidegate.types import MODEL_NAME, Sampling, Split, Task


@dataclass(slots=True)
class Episodes:
    """Runs one session of the agent on a task: open → run → finish. Used by rollout and evaluation."""

    gateway: GatewayClient
    worker: AgentRunner
    deadline_s: float
    epoch: int | None = None
    """Of the trainer that runs them: they end `cancelled` when a newer one comes."""

    async def run(
        self,
        name: str,
        task: Task,
        sampling: Sampling,
        split: Split,
        *,
        group_id: str | None = None,
        slot: int | None = None,
        seed: int | None = None,
        on_open: Callable[[str], None] = lambda _: None,
    ) -> SessionSummary:
        """One attempt, under one deadline from set-up to reward. Raises GatewayError only.

        `on_open` is told the session's id as soon as there is one.
        """
        access = await self.gateway.open_session(
            task=task, split=split, sampling=sampling, group_id=group_id, slot=slot,
            deadline_s=self.deadline_s, seed=seed, metadata={"attempt": name}, epoch=self.epoch,
        )  # fmt: skip
        on_open(access.session_id)
        result = await self.worker.run(
            name,
            task.view(),
            base_url=access.base_url,
            api_key=access.api_key,
            model=MODEL_NAME,
            seed=seed,
            deadline_s=self.deadline_s,
        )
        return await self.gateway.finish(
            access.session_id,
            output=result.output,
            outcome=result.outcome,
            reward=result.reward,
            metrics=result.metrics,
            error=result.error,
            epoch=self.epoch,
        )


def attempt_seed(run_seed: int, attempt: str) -> int:
    """A seed of its own for every attempt, the same in every run with the same seed."""
    return random.Random(f"{run_seed}/{attempt}").getrandbits(31)

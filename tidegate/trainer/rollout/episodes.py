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
    """Runs episodes for rollout and evaluation: open a session, run the agent, finish the session."""

    gateway: GatewayClient
    worker: AgentRunner
    deadline_s: float
    epoch: int | None = None
    """Epoch of the trainer; when a newer one begins, the episodes end `cancelled`."""

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
        """Run one attempt, with one deadline from set-up to reward.

        Args:
            name: Name of the attempt.
            task: Task of the episode.
            sampling: Sampling parameters of the session.
            split: Split of the task.
            group_id: Group of the attempt; None in an evaluation.
            slot: Slot of the attempt in its group.
            seed: Seed of the session's sampling and of the agent.
            on_open: Called with the session's id when it is open.

        Raises:
            GatewayError: No other exception is raised.
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
    """Return the seed of an attempt, the same in every run with the same seed."""
    return random.Random(f"{run_seed}/{attempt}").getrandbits(31)

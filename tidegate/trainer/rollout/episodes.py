"""Runs one episode: opens its session, has an agent run it, and waits for its end."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from tidegate.config import AgentSettings
from tidegate.errors import GatewayError
from tidegate.gateway.client import GatewayClient, SessionAccess, SessionSummary
from tidegate.trainer.processes.agent_worker import AgentRunner
from tidegate.types import MODEL_NAME, Sampling, Split, Task

WORKERS_POLL_S = 1.0
ABSENT_S = 5.0
"""Seconds without a connected worker after which there is none: a restarted gateway does not know them."""


class EpisodeSource(ABC):
    """Runs the episodes of rollout and evaluation, in processes of the run or in remote workers."""

    offer_heartbeat_s: float | None = None
    """Set if sessions are offered to workers."""

    def __init__(self, gateway: GatewayClient, deadline_s: float, epoch: int | None = None) -> None:
        """`epoch` is the trainer's; when a newer one begins, the episodes end `cancelled`."""
        self.gateway = gateway
        self.deadline_s = deadline_s
        self.epoch = epoch

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
        candidate: bool = False,
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
            candidate: Whether to sample from the candidate version.

        Raises:
            GatewayError: No other exception is raised.
        """
        access = await self.gateway.open_session(
            task=task, split=split, sampling=sampling, group_id=group_id, slot=slot,
            deadline_s=self.deadline_s, seed=seed, metadata={"attempt": name}, epoch=self.epoch,
            offer_heartbeat_s=self.offer_heartbeat_s, candidate=candidate,
        )  # fmt: skip
        on_open(access.session_id)
        try:
            return await self._end(access, name, task, seed)
        except asyncio.CancelledError:
            if group_id is None and self.offer_heartbeat_s is not None:  # no group ends it
                with contextlib.suppress(GatewayError):
                    await self.gateway.delete_session(access.session_id)
            raise

    @abstractmethod
    async def _end(self, access: SessionAccess, name: str, task: Task, seed: int | None) -> SessionSummary:
        """Have an agent run the session; return how it ended."""


class LocalEpisodes(EpisodeSource):
    """Agents run in processes of the run."""

    def __init__(
        self, gateway: GatewayClient, worker: AgentRunner, deadline_s: float, epoch: int | None = None
    ) -> None:
        super().__init__(gateway, deadline_s, epoch)
        self._worker = worker

    async def _end(self, access: SessionAccess, name: str, task: Task, seed: int | None) -> SessionSummary:
        result = await self._worker.run(
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


class RemoteEpisodes(EpisodeSource):
    """Remote workers take the sessions from the gateway and finish them."""

    def __init__(
        self, gateway: GatewayClient, heartbeat_s: float, deadline_s: float, epoch: int | None = None
    ) -> None:
        super().__init__(gateway, deadline_s, epoch)
        self.offer_heartbeat_s = heartbeat_s

    async def _end(self, access: SessionAccess, name: str, task: Task, seed: int | None) -> SessionSummary:
        return await self.gateway.result(access.session_id)


def episode_source(
    agent: AgentSettings, gateway: GatewayClient, worker: AgentRunner, epoch: int | None = None
) -> EpisodeSource:
    """Return the source that `agent.source` names; `worker` runs the agents of a local one."""
    if agent.source == "remote":
        return RemoteEpisodes(gateway, agent.heartbeat_s, agent.deadline_s, epoch)
    return LocalEpisodes(gateway, worker, agent.deadline_s, epoch)


async def watch_workers(gateway: GatewayClient, set_connected: Callable[[bool], None]) -> None:
    """Report for ever whether any worker is connected."""
    last = -math.inf
    while True:
        with contextlib.suppress(GatewayError):
            if any(worker["connected"] for worker in (await gateway.attempts())["workers"]):
                last = time.monotonic()
            set_connected(time.monotonic() - last < ABSENT_S)
        await asyncio.sleep(WORKERS_POLL_S)


def attempt_seed(run_seed: int, attempt: str) -> int:
    """Return the seed of an attempt, the same in every run with the same seed."""
    return random.Random(f"{run_seed}/{attempt}").getrandbits(31)

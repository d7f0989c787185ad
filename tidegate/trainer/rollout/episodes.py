"""Runs one episode: offers its session to workers, and waits for its end."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import Callable

from tidegate.errors import GatewayError
from tidegate.gateway.client import GatewayClient, SessionSummary
from tidegate.settings.run import AgentSettings
from tidegate.types import Sampling, Split, Task

WORKERS_POLL_S = 1.0
ABSENT_S = 5.0
"""Seconds without a connected worker after which there is none, so that workers can reconnect to a restarted
gateway."""


class EpisodeSource:
    """Runs the episodes of rollout and evaluation: offers sessions to workers, and waits for their end.

    Args:
        gateway: The gateway of the sessions.
        deadline_s: Seconds for which an episode may run.
        epoch: Epoch of the trainer; when a newer one begins, the episodes end `cancelled`.
        heartbeat_s: Interval of the workers' heartbeats; 0: the trainer's own agents run the episodes.
    """

    def __init__(
        self, gateway: GatewayClient, deadline_s: float, epoch: int | None = None, heartbeat_s: float = 0.0
    ) -> None:
        self.gateway = gateway
        self.epoch = epoch
        self._deadline_s = deadline_s
        self._heartbeat_s = heartbeat_s

    @classmethod
    def of(cls, agent: AgentSettings, gateway: GatewayClient, epoch: int | None = None) -> EpisodeSource:
        """Return the source that `agent.source` names."""
        return cls(gateway, agent.deadline_s, epoch, agent.heartbeat_s if agent.source == "remote" else 0.0)

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
        """Run one attempt; its deadline includes the set-up, and rewards have their own timeout.

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
            deadline_s=self._deadline_s, seed=seed, metadata={"attempt": name}, epoch=self.epoch,
            offer_heartbeat_s=self._heartbeat_s, candidate=candidate,
        )  # fmt: skip
        on_open(access.session_id)
        try:
            return await self.gateway.result(access.session_id)
        except asyncio.CancelledError:
            if group_id is None:  # no group ends it
                with contextlib.suppress(GatewayError):
                    await self.gateway.delete_session(access.session_id)
            raise


async def watch_workers(gateway: GatewayClient, set_connected: Callable[[bool], None]) -> None:
    """Report whether any worker is connected, until cancelled."""
    last = -math.inf
    while True:
        with contextlib.suppress(GatewayError):
            if any(worker["connected"] for worker in (await gateway.attempts())["workers"]):
                last = time.monotonic()
            set_connected(time.monotonic() - last < ABSENT_S)
        await asyncio.sleep(WORKERS_POLL_S)


def attempt_seed(run_seed: int, attempt: str) -> int:
    """Return the seed of an attempt, the same in every run with the same seed."""
    # Seeded by text: `hash` of a text differs between processes.
    return random.Random(f"{run_seed}/{attempt}").getrandbits(31)

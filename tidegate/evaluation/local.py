"""Evaluation of a model's weights: an engine and a gateway of its own, started and ended with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from tidegate.config import Settings
from tidegate.evaluation.sampler import SampledAttempt
from tidegate.trainer.preflight import check_engines
from tidegate.trainer.processes.launcher import start_processes
from tidegate.trainer.processes.local import LocalProcesses
from tidegate.trainer.processes.supervisor import TaskSupervisor
from tidegate.trainer.rollout.episodes import Episodes
from tidegate.types import Sampling, Task, Trajectory


@dataclass(slots=True)
class _Attempt:
    episodes: Episodes
    sampling: Sampling

    async def __call__(self, name: str, task: Task, seed: int) -> Trajectory:
        gateway = self.episodes.gateway
        summary = await self.episodes.run(name, task, self.sampling, "eval", seed=seed)
        trajectory = await gateway.trajectory(summary.session_id)
        await gateway.delete_session(summary.session_id)
        return trajectory


@contextlib.asynccontextmanager
async def hosted(
    settings: Settings,
    sampling: Sampling,
    directory: Path,
    guard: TaskSupervisor,
    note: Callable[[str], None],
) -> AsyncIterator[SampledAttempt]:
    """Serves `settings.model.path` (or uses `settings.engine.urls`) and gives the way to run an episode.

    Logs go to `<directory>/logs`; news go to `note`. A process that dies for good ends what `guard` runs.
    Raises StartError or ConfigError where a process cannot start.
    """
    await asyncio.to_thread(check_engines, settings.engine.urls)
    weights = settings.model.path.absolute()
    async with contextlib.AsyncExitStack() as stack:
        try:
            processes = await start_processes(
                settings, directory, lambda: (weights, 0), guard, note, stack, LocalProcesses()
            )
            episodes = Episodes(processes.gateway, processes.worker, settings.agent.deadline_s)
            yield _Attempt(episodes, sampling)
        finally:
            await guard.close()  # before the processes are stopped, which would look like a death

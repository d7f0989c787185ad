"""Evaluates a model's weights with an engine and a gateway that it starts and stops."""

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
    """Serves `model.path` (or uses `engine.urls`) and yields a function that runs an
    episode.

    Logs go to `<directory>/logs`, messages to `note`. If a process fails for good, the task of `guard` ends.
    Raises StartError or ConfigError if a process cannot start.
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
            await guard.close()  # before the processes stop, which it would report as failures

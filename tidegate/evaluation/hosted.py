"""Evaluation of a model's weights: an engine and a gateway of its own, started and ended with it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from tidegate.config import Settings
from tidegate.errors import StartError
from tidegate.evaluation.sampler import Attempt
from tidegate.gateway.client import GatewayClient
from tidegate.trainer.guard import Guard
from tidegate.trainer.rollout import Episodes
from tidegate.trainer.services import Service
from tidegate.trainer.workers import AgentWorker
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
    settings: Settings, sampling: Sampling, directory: Path, guard: Guard
) -> AsyncIterator[Attempt]:
    """Serves `settings.model.path` (or uses `settings.engine.urls`) and gives the way to run an episode.

    Logs go to `<directory>/logs`. A process that dies ends what `guard` runs. Raises StartError or
    ConfigError where a process cannot start.
    """
    async with contextlib.AsyncExitStack() as stack:
        urls = list(settings.engine.urls)
        if not urls:
            urls.append(await _start("engine", _engine(settings), directory, guard, stack))
        url = await _start("gateway", _gateway(settings, urls), directory, guard, stack)
        client = await stack.enter_async_context(GatewayClient(url))
        worker = await AgentWorker.start(
            settings.agent.use, settings.agent.options, directory / "logs" / "agent.log"
        )
        stack.push_async_callback(worker.close)
        yield _Attempt(Episodes(client, worker, settings.agent.deadline_s), sampling)


async def _start(
    verb: str, arguments: list[str], directory: Path, guard: Guard, stack: contextlib.AsyncExitStack
) -> str:
    service = Service(verb, lambda: [*arguments, "--port", "0"], directory)
    stack.push_async_callback(service.stop)
    url = await service.start()
    guard.watch(_keep(service), verb)
    stack.push_async_callback(guard.close)  # before the service is stopped, which would look like a death
    return url


async def _keep(service: Service) -> None:
    how = await service.died()
    raise StartError(f"{how}; {service.last_words()}")


def _engine(settings: Settings) -> list[str]:
    engine = settings.engine
    return [
        "--model", str(settings.model.path.absolute()), "--device", engine.device, "--dtype", engine.dtype,
        "--threads", str(engine.threads), "--max-slots", str(engine.max_slots),
        "--max-context", str(engine.max_context),
    ]  # fmt: skip


def _gateway(settings: Settings, engines: list[str]) -> list[str]:
    return [
        "--model", str(settings.model.path), "--tool-parser", settings.gateway.tool_parser,
        "--env", settings.env.use, "--env-options", json.dumps(settings.env.options),
        *(word for url in engines for word in ("--engine", url)),
    ]  # fmt: skip

"""Runs episodes on a model's weights, with an engine and a gateway that it starts and stops, or against an
OpenAI-compatible endpoint, which the agent calls directly."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict, dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from tidegate.config import LoRASettings, Settings
from tidegate.envs.base import Environment
from tidegate.errors import ConfigError, NoUsableEpisodesError
from tidegate.evaluation.offers import AttemptServer
from tidegate.evaluation.sampler import SampledAttempt
from tidegate.gateway.environments.client import EnvironmentClient
from tidegate.gateway.groups.rewards import Scorer
from tidegate.service.http_client import bearer
from tidegate.service.service import LOOPBACK
from tidegate.trainer.preflight import check_engines
from tidegate.trainer.processes.agents import AgentProcess, supervise_agents
from tidegate.trainer.processes.launcher import start_processes
from tidegate.trainer.processes.servers import LocalProcesses, environment_server
from tidegate.trainer.processes.supervisor import TaskSupervisor
from tidegate.trainer.rollout.episodes import EpisodeSource
from tidegate.types import Outcome, Sampling, Task, Trajectory

PROBE_S = 5.0
"""Timeout of the request for an endpoint's models."""


@contextlib.asynccontextmanager
async def hosted(
    settings: Settings,
    sampling: Sampling,
    directory: Path,
    guard: TaskSupervisor,
    note: Callable[[str], None],
) -> AsyncIterator[SampledAttempt]:
    """Serves `model.path` (or uses `engine.urls`) and yields a function that runs an episode.

    Logs go to `<directory>/logs`, messages to `note`. If a process fails for good, the task of `guard` ends.
    Raises StartError or ConfigError if a process cannot start.
    """
    await asyncio.to_thread(check_engines, settings.engine.urls)
    weights = settings.model.path.absolute()
    # No trainer runs: its ranks need no GPUs.
    trainer = settings.trainer.model_copy(update={"device": "cpu", "ranks": 1})
    policies = settings.policies
    if policies:  # no trainer makes their adapters, so engines serve whole models
        trainer = trainer.model_copy(update={"lora": LoRASettings()})
        policies = {name: own.model_copy(update={"lora": None}) for name, own in policies.items()}
    settings = settings.model_copy(update={"trainer": trainer, "policies": policies})
    async with contextlib.AsyncExitStack() as stack:
        try:
            processes = await start_processes(
                settings, directory, lambda: (weights, 0), guard, note, stack, LocalProcesses()
            )
            gateway = processes.gateway
            episodes = EpisodeSource.of(settings.agent, gateway)

            async def attempt(name: str, task: Task, seed: int) -> Trajectory:
                summary = await episodes.run(name, task, sampling, "eval", seed=seed)
                trajectory = await gateway.trajectory(summary.session_id)
                await gateway.delete_session(summary.session_id)
                return trajectory

            yield attempt
        finally:
            await guard.close()  # before the processes stop, which it would report as failures


@dataclass(frozen=True, slots=True)
class ModelEndpoint:
    """An OpenAI-compatible base URL, the model's name there, and the key."""

    base_url: str
    model: str
    api_key: str


@contextlib.asynccontextmanager
async def direct(
    settings: Settings,
    environment: Environment,
    endpoint: ModelEndpoint,
    directory: Path,
    guard: TaskSupervisor,
    note: Callable[[str], None],
) -> AsyncIterator[SampledAttempt]:
    """Yields a function that runs an episode against the endpoint; raises StartError or ConfigError.

    If the agents' process fails for good, the task of `guard` ends.

    There is no gateway: the agent and the endpoint determine the sampling, and a trajectory has messages (the
    task's, and the output as the reply) but no turns or tokens.
    """
    if environment.stateful:
        raise ConfigError(
            f"env.use = {settings.env.use!r} has states or tools, which agents reach through a gateway: "
            "evaluate a model of your own, without --url"
        )
    offers, key = AttemptServer(), secrets.token_urlsafe(24)
    async with contextlib.AsyncExitStack() as stack:
        service = environment_server(settings, key, directory, LOOPBACK, 0)
        stack.push_async_callback(service.stop)
        environments = EnvironmentClient([await service.start()], key)
        stack.push_async_callback(environments.close)
        await environments.start()
        access = await stack.enter_async_context(offers.serve())
        process = AgentProcess(settings.agent, access, directory, "agent")
        stack.push_async_callback(process.stop)
        stack.push_async_callback(guard.close)
        await process.start()
        guard.watch(supervise_agents(process, offers, note), process.name)
        answers, described = await asyncio.to_thread(describe_endpoint, endpoint)
        if not answers:
            note(described)
        scorer = Scorer(environments)

        async def attempt(name: str, task: Task, seed: int) -> Trajectory:
            began = time.monotonic()
            report = await offers.run(
                {
                    "task": {"id": task.id, "messages": task.messages},
                    **asdict(endpoint),
                    "seed": seed,
                    "deadline_s": settings.agent.deadline_s,
                }
            )
            trajectory = _trajectory(task, report)
            await scorer.reward(trajectory, task, {}, report.get("reward"))
            trajectory.seconds = time.monotonic() - began
            return trajectory

        try:
            yield attempt
        except NoUsableEpisodesError as error:
            raise NoUsableEpisodesError(f"{error}\n{described}") from None


def describe_endpoint(endpoint: ModelEndpoint) -> tuple[bool, str]:
    """Asks an endpoint for its models.

    An endpoint without `GET /models` may serve an agent nevertheless.

    Returns:
        Whether anything answers, and one line that names the address and the answer.
    """
    address = f"{endpoint.base_url}/models"
    request = Request(address, headers=bearer(endpoint.api_key))
    try:
        with urlopen(request, timeout=PROBE_S) as response:
            status, server, content = response.status, response.headers.get("server"), response.read(100_000)
    except HTTPError as error:
        status, server, content = error.code, error.headers.get("server"), error.read(100_000)
    except (OSError, HTTPException, ValueError) as error:
        why = getattr(error, "reason", error) or type(error).__name__
        return False, f"--url: nothing answers at {address}: {why}; start the server, or correct the address"
    try:
        names = [str(model["id"]) for model in json.loads(content)["data"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        said = f" ({server})" if server else ""
        text = " ".join(content.decode("utf-8", "replace").split())[:100]
        return True, (
            f"--url: {address} answers with status {status}{said}: {text or 'no body'}; the address of an "
            "OpenAI-compatible server ends in /v1 mostly, and --api-key-env names the variable with its key"
        )
    return True, f"--url: {address} lists the models {', '.join(names[:20]) or 'none'}"


def _trajectory(task: Task, report: Mapping[str, Any]) -> Trajectory:
    output, outcome = report.get("output"), report["outcome"]
    reply = [] if output is None else [{"role": "assistant", "content": output}]
    return Trajectory(
        session_id="",
        task_id=task.id,
        env=task.env,
        split="eval",
        outcome=Outcome.COMPLETED if outcome is None else Outcome(outcome),
        turns=[],
        metrics=report.get("metrics", {}),
        output=output,
        error=report.get("error"),
        messages=[*task.messages, *reply],
    )

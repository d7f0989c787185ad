"""Evaluates an OpenAI-compatible endpoint, which the agent calls directly; rewards are computed here.

There is no gateway: the agent and the endpoint determine the sampling, and a trajectory has messages (the
task's, and the output as the reply) but no turns or tokens.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from tidegate.config import Settings
from tidegate.envs.base import Environment
from tidegate.evaluation.sampler import SampledAttempt
from tidegate.gateway.groups.rewards import Scorer
from tidegate.trainer.processes.agent_worker import AgentResult, AgentWorker
from tidegate.types import Outcome, Task, Trajectory


@dataclass(frozen=True, slots=True)
class ModelEndpoint:
    """An OpenAI-compatible base URL, the model's name there, and the key."""

    base_url: str
    model: str
    api_key: str


@dataclass(slots=True)
class _Attempt:
    endpoint: ModelEndpoint
    worker: AgentWorker
    scorer: Scorer
    deadline_s: float

    async def __call__(self, name: str, task: Task, seed: int) -> Trajectory:
        began = time.monotonic()
        result = await self.worker.run(
            name,
            task.view(),
            base_url=self.endpoint.base_url,
            api_key=self.endpoint.api_key,
            model=self.endpoint.model,
            seed=seed,
            deadline_s=self.deadline_s,
        )
        trajectory = _trajectory(task, result)
        await self.scorer.reward(trajectory, task, {}, result.reward)
        trajectory.seconds = time.monotonic() - began
        return trajectory


@contextlib.asynccontextmanager
async def direct(
    settings: Settings, environment: Environment, endpoint: ModelEndpoint, directory: Path
) -> AsyncIterator[SampledAttempt]:
    """Yields a function that runs an episode against the endpoint; raises StartError or ConfigError."""
    worker = await AgentWorker.start(
        settings.agent.use, settings.agent.options, directory / "logs" / "agent.log"
    )
    try:
        scorer = Scorer(environment.rewarders(), settings.env.reward_timeout_s)
        yield _Attempt(endpoint, worker, scorer, settings.agent.deadline_s)
    finally:
        await worker.close()


def _trajectory(task: Task, result: AgentResult) -> Trajectory:
    reply = [] if result.output is None else [{"role": "assistant", "content": result.output}]
    return Trajectory(
        session_id="",
        task_id=task.id,
        env=task.env,
        split="eval",
        outcome=result.outcome or Outcome.COMPLETED,
        turns=[],
        metrics=dict(result.metrics),
        output=result.output,
        error=result.error,
        messages=[*task.messages, *reply],
    )

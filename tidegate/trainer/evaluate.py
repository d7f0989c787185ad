"""Evaluation: the agent on held-out problems, through the same gateway, never trained on.

`eval/reward` is the mean reward sampled as in training, `eval/reward_greedy` at temperature 0, and
`eval/reward_<set>` that of a further held-out set. Episodes that failed are counted in `eval/failed` and
are no part of a mean.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tidegate.config import Settings
from tidegate.errors import GatewayError
from tidegate.observer import Observer
from tidegate.trainer.rollout import Episodes, attempt_seed
from tidegate.types import Sampling, Task, Trajectory

GREEDY = 0.0
Episode = tuple[str, str, Trajectory]
"""Evaluation set, mode (`sampled` or `greedy`), trajectory."""


@dataclass(slots=True)
class Evaluation:
    """What came of one evaluation."""

    metrics: dict[str, float]
    episodes: list[Episode]
    reasons: Counter[str]
    """Why episodes failed."""


@dataclass(slots=True)
class Evaluator:
    """Evaluates with bounded concurrency under one deadline; a failing evaluation is data, not an error."""

    settings: Settings
    episodes: Episodes
    sets: dict[str, list[Task]]
    observer: Observer
    keep: Callable[[int, list[Episode]], None]
    last_progress: float = 0.0
    _done: int = 0

    async def full(self, step: int) -> Evaluation:
        """Every held-out set sampled, the main one greedily too."""
        count = self.settings.eval.tasks
        plan = [(name, "sampled", tasks[:count]) for name, tasks in self.sets.items()]
        plan.append(("", "greedy", self.sets[""][:count]))
        return await self._evaluate(step, plan)

    async def interim(self, step: int) -> Evaluation:
        """The main held-out set, sampled, with fewer problems."""
        return await self._evaluate(
            step, [("", "sampled", self.sets[""][: self.settings.eval.interim_tasks])]
        )

    async def _evaluate(self, step: int, plan: Sequence[tuple[str, str, list[Task]]]) -> Evaluation:
        gate = asyncio.Semaphore(self.settings.eval.max_concurrency)
        reasons: Counter[str] = Counter()
        wanted = [(name, mode, n, task) for name, mode, tasks in plan for n, task in enumerate(tasks)]
        self._done, began = 0, time.monotonic()

        async def one(name: str, mode: str, number: int, task: Task) -> Episode | None:
            async with gate:
                found = await self._episode(
                    f"eval{step}/{name or 'main'}/{mode}/{number}", mode, task, reasons
                )
            self._done += 1
            self.last_progress = time.monotonic()
            self.observer.progress("evaluation", self._done, len(wanted))
            return None if found is None else (name, mode, found)

        running = [asyncio.create_task(one(*each)) for each in wanted]
        try:
            await asyncio.wait(running, timeout=self.settings.eval.deadline_s)
        finally:
            unfinished = sum(not task.done() for task in running)
            for task in running:
                task.cancel()
            ended = await asyncio.gather(*running, return_exceptions=True)
        if unfinished:
            reasons[f"not finished within eval.deadline_s = {self.settings.eval.deadline_s}"] += unfinished
        for result in ended:
            if isinstance(result, Exception):
                raise result
        episodes = [result for result in ended if isinstance(result, tuple)]
        self.keep(step, episodes)
        metrics = _metrics(plan, episodes, len(wanted)) | {"eval/seconds": time.monotonic() - began}
        return Evaluation(metrics, episodes, reasons)

    async def _episode(self, name: str, mode: str, task: Task, reasons: Counter[str]) -> Trajectory | None:
        sampling = self.settings.sampling
        temperature = GREEDY if mode == "greedy" else sampling.temperature
        gateway = self.episodes.gateway
        try:
            summary = await self.episodes.run(
                name,
                task,
                Sampling(temperature, max_tokens=sampling.max_tokens),
                "eval",
                seed=attempt_seed(self.settings.run.seed, name.partition("/")[2]),  # alike at every step
            )
            trajectory = await gateway.trajectory(summary.session_id)
            await gateway.delete_session(summary.session_id)
        except GatewayError as error:
            reasons[str(error)] += 1
            return None
        if trajectory.reward is None:
            reasons[f"{trajectory.outcome}: {trajectory.error}"] += 1
        return trajectory


def _metrics(
    plan: Sequence[tuple[str, str, list[Task]]], episodes: list[Episode], wanted: int
) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name, mode, _ in plan:
        rewards = [t.reward for s, m, t in episodes if (s, m) == (name, mode) and t.reward is not None]
        key = "eval/reward" + (f"_{name}" if name else "") + ("_greedy" if mode == "greedy" else "")
        if rewards:
            metrics[key] = float(np.mean(rewards))
            metrics[key.replace("reward", "episodes")] = float(len(rewards))
    told = [
        t.metrics["unparseable"]
        for s, m, t in episodes
        if (s, m) == ("", "sampled") and t.reward is not None and "unparseable" in t.metrics
    ]
    if told:  # wrong because nothing could be read, and not because what was read is wrong
        metrics["eval/unparseable"] = float(np.mean(told))
    metrics["eval/failed"] = float(wanted - sum(t.reward is not None for _, _, t in episodes))
    versions = [v for _, _, t in episodes for turn in t.turns for v, _, _ in turn.version_spans]
    if versions:
        metrics["eval/version_min"], metrics["eval/version_max"] = float(min(versions)), float(max(versions))
    return metrics

"""Runs an evaluation and writes its results, also those until an error or interruption."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import orjson

from tidegate.config import Settings
from tidegate.envs.base import Environment, check_reward_timeout, load_environment
from tidegate.errors import STOPPED, ConfigError
from tidegate.evaluation.attempts import ModelEndpoint, direct, hosted
from tidegate.evaluation.results import EvalResults
from tidegate.evaluation.sampler import SampledAttempt, SampledEpisode, Sampler
from tidegate.loading import did_you_mean
from tidegate.service import exact
from tidegate.service.directory_lock import DirectoryLock
from tidegate.trainer.processes.supervisor import TaskSupervisor
from tidegate.trainer.records.trajectories import bounded_answer, encode_trajectory
from tidegate.trainer.waits import unless_stopped
from tidegate.types import Sampling, Task, fields_of

RESULTS = "results.json"
EPISODES = "episodes.jsonl"


@dataclass(frozen=True, slots=True)
class EvalJob:
    """Parameters of an evaluation."""

    settings: Settings
    """Name the agent, the environment and, if there is no `endpoint`, the weights."""
    directory: Path
    """Directory of the results, without earlier ones."""
    endpoint: ModelEndpoint | None = None
    temperature: float = 1.0
    samples: int = 1
    ks: Sequence[int] = (1,)
    threshold: float = 1.0
    """Least reward of an episode that counts as right for pass@k."""
    sets: Sequence[str] = ()
    """Names of held-out sets (`main` is the main one); empty: all."""
    _: KW_ONLY
    tasks: int | None = None
    """Number of tasks of each set, from the first; None: all."""

    @property
    def target(self) -> str:
        if self.endpoint is not None:
            return f"{self.endpoint.model} at {self.endpoint.base_url}"
        return ", ".join(self.settings.engine.urls) or str(self.settings.model.path)

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, max_tokens=self.settings.sampling.max_tokens)


async def evaluate(
    job: EvalJob, progress: Callable[[int, int], None], note: Callable[[str], None]
) -> dict[str, Any]:
    """Runs an evaluation and writes `results.json` and `episodes.jsonl`.

    The first Ctrl-C ends it with the results so far (`status` is then `interrupted`), a second one exits at
    once.

    Args:
        job: Parameters of the evaluation.
        progress: Called with the numbers of episodes that have ended, and of all.
        note: Called with lines for the user.

    Returns:
        The content of `results.json`.

    Raises:
        TidegateError: The evaluation failed; the results so far are written.
    """
    environment = load_environment(job.settings.env.use, job.settings.env.options)
    check_reward_timeout(environment, job.settings.env.reward_timeout_s)
    sets = choose(environment, job.sets, job.tasks)
    eval_results, began = EvalResults(job.threshold, job.ks), time.monotonic()
    with contextlib.ExitStack() as stack:
        stack.enter_context(DirectoryLock(job.directory, "tidegate eval"))
        if (job.directory / RESULTS).exists():
            raise ConfigError(f"{job.directory} already contains results; choose another directory")
        file = stack.enter_context((job.directory / EPISODES).open("wb"))

        def keep(episode: SampledEpisode) -> None:
            eval_results.add(episode)
            file.write(_line(episode, job.temperature))

        guard = TaskSupervisor()
        status = "failed"
        reasons: Counter[str] = Counter()
        try:
            async with _attempts(job, environment, guard, note) as attempt:
                sampler = Sampler(
                    attempt, sets, job.samples, job.settings.eval.max_concurrency, job.settings.run.seed,
                    job.settings.trainer.max_attempts, keep, progress,
                )  # fmt: skip
                reasons = sampler.reasons
                status = await _until_stopped(guard.run(sampler.run()))
        finally:
            results = {
                "status": status,
                **_described(job),
                "seconds": round(time.monotonic() - began, 3),
                "sets": {name or "main": eval_results.summary(name) for name in sets},
                "failures": dict(reasons.most_common(5)),
            }
            (job.directory / RESULTS).write_bytes(orjson.dumps(results, option=orjson.OPT_INDENT_2))
    return results


def choose(environment: Environment, names: Sequence[str], tasks: int | None) -> dict[str, list[Task]]:
    """Returns the named held-out sets; raises ConfigError if one does not exist or is invalid."""
    sets = {name: list(members) for name, members in environment.eval_sets().items()}
    known = [name or "main" for name in sets]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"{environment.name}: there is no held-out set {name!r}{did_you_mean(name, known)}; "
                f"there are {', '.join(known)}"
            )
    chosen = {
        name: members[:tasks] for name, members in sets.items() if not names or (name or "main") in names
    }
    for name, members in chosen.items():
        duplicates = [id for id, times in Counter(task.id for task in members).items() if times > 1]
        if duplicates:
            raise ConfigError(
                f"{environment.name}: {len(duplicates)} ids stand for several tasks of the held-out set "
                f"{name or 'main'!r}, the first is {duplicates[0]!r}; give each task a unique id, by which "
                "its samples are counted"
            )
    if not any(chosen.values()):
        raise ConfigError(f"{environment.name}: its held-out sets are empty")
    return chosen


def _attempts(
    job: EvalJob, environment: Environment, guard: TaskSupervisor, note: Callable[[str], None]
) -> contextlib.AbstractAsyncContextManager[SampledAttempt]:
    if job.endpoint is not None:
        return direct(job.settings, environment, job.endpoint, job.directory, guard, note)
    return hosted(job.settings, job.sampling, job.directory, guard, note)


async def _until_stopped(work: Coroutine[Any, Any, None]) -> str:
    """Returns `completed`, or `interrupted` if SIGINT or SIGTERM came first."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(STOPPED)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)

    async def completed() -> str:
        await work
        return "completed"

    try:
        return await unless_stopped(stop, completed()) or "interrupted"
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _described(job: EvalJob) -> dict[str, Any]:
    settings = job.settings
    sampling: dict[str, Any] | None = fields_of(job.sampling) if job.endpoint is None else None
    return {
        "target": job.target,
        "env": settings.env.model_dump(mode="json"),
        "agent": {"use": settings.agent.use, "options": settings.agent.options},
        "samples": job.samples,
        "sampling": sampling,
        "threshold": job.threshold,
        "seed": settings.run.seed,
    }


def _line(episode: SampledEpisode, temperature: float) -> bytes:
    line = {
        "eval_set": episode.eval_set,
        "mode": "sampled" if temperature > 0 else "greedy",
        "sample": episode.sample,
        **encode_trajectory(episode.trajectory),
        "answer": bounded_answer(episode.task.answer),
    }
    return exact.dumps(line, orjson.OPT_SERIALIZE_NUMPY, str) + b"\n"


def next_directory(parent: Path) -> Path:
    """Returns the first free `<parent>/N`."""
    number = 1
    while (parent / str(number)).exists():
        number += 1
    return parent / str(number)

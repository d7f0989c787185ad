"""Runs an agent on tasks, several samples each, with bounded concurrency."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

from tidegate.errors import GatewayError, NoUsableEpisodesError
from tidegate.tracebacks import FailureReasons
from tidegate.trainer.rollout.episodes import attempt_seed
from tidegate.types import Outcome, Task, Trajectory

GIVE_UP_AFTER = 16
"""If the first 16 episodes all fail, the evaluation stops."""
_RETRY_S = 1.0


SampledAttempt = Callable[[str, Task, int], Awaitable[Trajectory]]
"""Name, task and seed → the scored episode of the agent; raises GatewayError if the gateway fails."""


@dataclass(frozen=True, slots=True)
class SampledEpisode:
    """One sample with its held-out set, its number (from 0) and its trajectory."""

    eval_set: str
    task: Task
    sample: int
    trajectory: Trajectory


@dataclass(slots=True)
class Sampler:
    """Samples every task of `sets` `samples` times: all tasks once, then all of them again.

    An episode that ends as `infra_error`, or as `cancelled` because the agents' process exited, is attempted
    up to `max_attempts` times.
    """

    attempt: SampledAttempt
    sets: Mapping[str, Sequence[Task]]
    samples: int
    concurrency: int
    seed: int
    max_attempts: int
    keep: Callable[[SampledEpisode], None]
    """Called with every episode when it ends."""
    progress: Callable[[int, int], None]
    _: KW_ONLY
    done: int = 0
    succeeded: int = 0
    reasons: FailureReasons = field(default_factory=FailureReasons)
    """Why episodes failed."""

    @property
    def total(self) -> int:
        return self.samples * sum(len(tasks) for tasks in self.sets.values())

    async def run(self) -> None:
        """Runs until all tasks are sampled; may be cancelled. Raises NoUsableEpisodesError if all fail."""
        order = self._order()
        workers = [
            asyncio.create_task(self._work(order), name=f"sampler {n}")
            for n in range(min(self.concurrency, self.total))
        ]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        if not self.succeeded:
            raise self._no_usable_episodes()

    def _order(self) -> Iterator[tuple[str, Task, int]]:
        for sample in range(self.samples):
            for name, tasks in self.sets.items():
                for task in tasks:
                    yield name, task, sample

    async def _work(self, order: Iterator[tuple[str, Task, int]]) -> None:
        for name, task, sample in order:
            trajectory = await self._settle(f"{name or 'main'}/{task.id}/{sample}", task)
            self.done += 1
            if trajectory.reward is None:
                self.reasons.count(_reason(trajectory))
            else:
                self.succeeded += 1
            self.keep(SampledEpisode(name, task, sample, trajectory))
            self.progress(self.done, self.total)
            if not self.succeeded and self.done >= GIVE_UP_AFTER:
                raise self._no_usable_episodes()

    async def _settle(self, name: str, task: Task) -> Trajectory:
        seed = attempt_seed(self.seed, name)
        for number in range(self.max_attempts):
            try:
                trajectory = await self.attempt(f"{name}/{number}", task, seed)
            except GatewayError as error:
                trajectory = failed(task, Outcome.INFRA_ERROR, str(error))
            if not trajectory.outcome.is_infrastructure_failure:
                break
            if number + 1 < self.max_attempts:
                await asyncio.sleep(_RETRY_S * 2**number)
        return trajectory

    def _no_usable_episodes(self) -> NoUsableEpisodesError:
        reason, number = self.reasons.most_common(1)[0]
        return NoUsableEpisodesError(f"none of {self.done} episodes succeeded; {number} of them: {reason}")


def failed(task: Task, outcome: Outcome, error: str) -> Trajectory:
    """The trajectory of an episode of which nothing else is known."""
    return Trajectory("", task.id, task.env, "eval", outcome, [], error=error)


def _reason(trajectory: Trajectory) -> str:
    """The first line of what went wrong, so that equal failures are counted together."""
    return f"{trajectory.outcome}: {(trajectory.error or 'unknown').splitlines()[0]}"

"""Evaluation: runs the agent on held-out tasks through the same gateway.

`eval/reward` is the mean reward with training sampling, `eval/reward_greedy` that at temperature 0, and
`eval/reward_<set>` that of a further held-out set. A suite (`eval.suites`) has `eval/<suite>/reward`. Failed
episodes are excluded from means and counted in `eval/failed` and `eval/<suite>/failed`.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tidegate.config import Settings
from tidegate.errors import ConfigError, GatewayError
from tidegate.observer import Observer
from tidegate.settings.evaluation import EvalSettings, EvalSuite
from tidegate.tracebacks import FailureReasons
from tidegate.trainer.admission.pace import Pace
from tidegate.trainer.records.recorder import custom_metrics, policy_rewards
from tidegate.trainer.records.trajectories import bounded_answer
from tidegate.trainer.rollout.episodes import EpisodeSource, attempt_seed
from tidegate.trainer.rollout.pause import INFRA_BACKOFF_MAX_S, POLL_S, backoff_s
from tidegate.types import ENGINE_WAIT_S, Outcome, Sampling, Task, Trajectory

GREEDY = 0.0
GREEDY_SET = "greedy"
"""Reserved: the name of no held-out set."""
SUITE = "suite/"
"""Before the name of a suite, where the name of an evaluation set is expected."""
Plan = list[tuple[str, str, list[Task]]]
"""Parts of an evaluation: evaluation set, mode (`sampled` or `greedy`), tasks."""
Episode = tuple[str, str, Trajectory]
"""Evaluation set, mode, trajectory."""


@dataclass(slots=True)
class Evaluation:
    """Result of one evaluation."""

    metrics: dict[str, float]
    episodes: list[Episode]
    reasons: FailureReasons
    """Failure reason → number of episodes."""


@dataclass(slots=True, kw_only=True)
class Evaluator:
    """Runs evaluations with bounded concurrency and one deadline. Failed episodes are counted, not raised."""

    settings: Settings
    episodes: EpisodeSource
    sets: dict[str, list[Task]]
    observer: Observer
    save: Callable[[int, list[Episode]], Awaitable[None]]
    engines_down: Callable[[], bool] = lambda: False
    """While it returns True, time does not count against the deadline."""
    pace: Pace = field(default_factory=Pace)
    """Limit of running episodes if the engines are slow."""
    last_progress: float = 0.0
    _done: int = 0
    _jitter: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self) -> None:
        """Raises ConfigError if two scores would have the same name."""
        if GREEDY_SET in self.sets:
            raise ConfigError(
                f"the environment's held-out set {GREEDY_SET!r} would have the score eval/reward_greedy, as "
                "has the main set at temperature 0: give it another name in eval_sets()"
            )

        check_suites(self.settings.eval, self.sets)

    async def full(self, step: int) -> Evaluation:
        """Evaluate every held-out set sampled, the main one also greedily, and every suite."""
        return await self._evaluate(step, self._full() + self._suites(lambda suite: True))

    def due(self, step: int) -> bool:
        """Return whether there is an evaluation after a step between the first and the last."""
        return bool(self._interim(step))

    async def interim(self, step: int, version: int | None = None) -> Evaluation | None:
        """Evaluate what is due between the first and the last step; None if nothing is.

        This is the main held-out set, sampled, with fewer tasks, and the suites. If the main set reaches
        `trainer.until`, all sets are evaluated as in `full`.

        Args:
            step: Step of the evaluated weights.
            version: The version that engines of its own have; an episode with tokens of another counts as
                failed. None: all engines serve it.
        """
        plan = self._interim(step)
        if not plan:
            return None
        evaluation = await self._evaluate(step, plan, version=version)
        if not self.settings.trainer.reached(evaluation.metrics):
            return evaluation
        suites = [part for part in plan if part[0].startswith(SUITE)]
        return await self._evaluate(step, self._full() + suites, version=version)

    def _interim(self, step: int) -> Plan:
        plan = self._suites(lambda suite: _due(suite.every, step))
        if _due(self.settings.eval.every, step):
            plan.insert(0, ("", "sampled", self.sets[""][: self.settings.eval.interim_tasks]))
        return plan

    def _full(self) -> Plan:
        count = self.settings.eval.tasks
        plan = [(name, "sampled", tasks[:count]) for name, tasks in self.sets.items()]
        return [*plan, ("", "greedy", self.sets[""][:count])]

    def _suites(self, chosen: Callable[[EvalSuite], bool]) -> Plan:
        return [
            (SUITE + name, "greedy" if suite.greedy else "sampled", self.sets[suite.set][: suite.tasks])
            for name, suite in self.settings.eval.suites.items()
            if chosen(suite)
        ]

    async def rewards(self, step: int, version: int | None) -> list[float]:
        """Evaluate as `interim`, without a record.

        Args:
            step: Step of the evaluated weights.
            version: The candidate version to sample from; None: the live one.

        Returns:
            The rewards, of a candidate only of the episodes with no token of another version.
        """
        plan = [("", "sampled", self.sets[""][: self.settings.eval.interim_tasks])]
        evaluation = await self._evaluate(step, plan, candidate=version is not None, save=False)
        return [
            episode.reward
            for _, _, episode in evaluation.episodes
            if episode.reward is not None
            and version in (None, *_versions(episode))
            and len(set(_versions(episode))) == 1
        ]

    async def _evaluate(
        self,
        step: int,
        plan: Plan,
        *,
        candidate: bool = False,
        version: int | None = None,
        save: bool = True,
    ) -> Evaluation:
        reasons = FailureReasons()
        planned = [(name, mode, n, task) for name, mode, tasks in plan for n, task in enumerate(tasks)]
        self._done, began = 0, time.monotonic()
        found: dict[int, Episode] = {}
        left = iter(enumerate(planned))

        async def place() -> None:
            """Runs one episode after another."""
            for index, (name, mode, number, task) in left:
                trajectory = await self._episode(
                    f"eval{step}/{name or 'main'}/{mode}/{number}",
                    mode,
                    task,
                    reasons,
                    step > 0,
                    candidate or version is not None,
                )
                self._done += 1
                self.last_progress = time.monotonic()
                self.observer.progress("evaluation", self._done, len(planned))
                if trajectory is not None:
                    found[index] = (name, mode, trajectory)

        # A task for each place and not for each episode: an evaluation may have thousands.
        places = min(self.settings.eval.max_concurrency, len(planned))
        running = [asyncio.create_task(place()) for _ in range(places)]
        try:
            await self._wait(running)
        finally:
            for task in running:
                task.cancel()
            ended = await asyncio.gather(*running, return_exceptions=True)
        for result in ended:
            # CancelledError is none: it is of episodes that the deadline ended.
            if isinstance(result, Exception):
                raise result
        if unfinished := len(planned) - self._done:
            reasons.count(
                f"not finished within eval.deadline_s = {self.settings.eval.deadline_s}", unfinished
            )
        episodes = [found[index] for index in sorted(found)]
        if save:
            await self.save(step, episodes)
        if version is not None:
            episodes = [episode for episode in episodes if _sampled_from(version, episode[2], reasons)]
        metrics = _metrics(plan, episodes) | {"eval/seconds": time.monotonic() - began}
        return Evaluation(metrics, episodes, reasons)

    async def _wait(self, running: list[asyncio.Task[None]]) -> None:
        pending, left = set(running), self.settings.eval.deadline_s
        while pending and left > 0:
            down, began = self.engines_down(), time.monotonic()
            # In short waits: engines may go down meanwhile, and such time does not count.
            _, pending = await asyncio.wait(pending, timeout=min(left, POLL_S))
            left -= 0.0 if down else time.monotonic() - began

    async def _episode(
        self, name: str, mode: str, task: Task, reasons: FailureReasons, retry: bool, candidate: bool
    ) -> Trajectory | None:
        """Run an episode; with `retry`, repeat it until the evaluation ends after each `infra_error`, and
        after a `timeout` of slow engines."""
        for tries in itertools.count(1):
            try:
                trajectory = await self._attempt(name, mode, task, candidate)
            except GatewayError as error:
                reasons.count(str(error))
                return None
            slow = ENGINE_WAIT_S in trajectory.metrics
            if not retry or not (slow or trajectory.outcome is Outcome.INFRA_ERROR):
                break
            self.last_progress = time.monotonic()
            await asyncio.sleep(backoff_s(tries, self._jitter, INFRA_BACKOFF_MAX_S))
        if trajectory.reward is None:
            reasons.count(f"{trajectory.outcome}: {trajectory.error}")
        return trajectory

    async def _attempt(self, name: str, mode: str, task: Task, candidate: bool) -> Trajectory:
        sampling, gateway = self.settings.sampling, self.episodes.gateway
        temperature = GREEDY if mode == "greedy" else sampling.temperature
        while self.pace.free < 1:  # noqa: ASYNC110 - it changes with the end of any episode of the run
            await asyncio.sleep(POLL_S)
        self.pace.started(name)
        try:
            summary = await self.episodes.run(
                name,
                task,
                Sampling(temperature, max_tokens=sampling.max_tokens),
                "eval",
                seed=attempt_seed(self.settings.run.seed, name.partition("/")[2]),  # the same at every step
                candidate=candidate,
            )
            slow = summary.engine_wait_s > 0
            if slow or summary.outcome.trainable:
                self.pace.ended(name, summary.sampled_tokens, slow=slow)
        finally:
            self.pace.forget(name)
        trajectory = await gateway.trajectory(summary.session_id)
        trajectory.answer = bounded_answer(task.answer)
        await gateway.delete_session(summary.session_id)
        return trajectory


def check_suites(settings: EvalSettings, sets: Mapping[str, Sequence[Task]]) -> None:
    """Raises ConfigError if a suite is of a held-out set that the environment does not have."""
    for name, suite in settings.suites.items():
        if suite.set not in sets:
            known = ", ".join(map(repr, sets))
            raise ConfigError(
                f"eval.suites.{name}.set = {suite.set!r} is not a held-out set of the environment, "
                f"which has {known}: correct it"
            )


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def _versions(trajectory: Trajectory) -> list[int]:
    """Return the policy versions of a trajectory's tokens."""
    return [version for turn in trajectory.turns for version, _, _ in turn.version_spans]


def _sampled_from(version: int, trajectory: Trajectory, reasons: FailureReasons) -> bool:
    """Return whether all tokens are of this version; otherwise count the failure."""
    if set(_versions(trajectory)) <= {version}:
        return True
    reasons.count(f"tokens of other versions than {version}, as its engine was lost")
    return False


def _metrics(plan: Plan, episodes: list[Episode]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name, mode, tasks in plan:
        rewards = [t.reward for s, m, t in episodes if (s, m) == (name, mode) and t.reward is not None]
        suite = name.removeprefix(SUITE) if name.startswith(SUITE) else None
        place = "eval/" if suite is None else f"eval/{suite}/"
        tail = (f"_{name}" if name else "") + ("_greedy" if mode == "greedy" else "") if suite is None else ""
        if rewards:
            metrics[f"{place}reward{tail}"] = float(np.mean(rewards))
            metrics[f"{place}episodes{tail}"] = float(len(rewards))
        failed = f"{place}failed"
        metrics[failed] = metrics.get(failed, 0.0) + len(tasks) - len(rewards)
    sampled = [t for s, m, t in episodes if (s, m) == ("", "sampled")]
    metrics |= {f"eval/policy/{name}": value for name, value in policy_rewards(sampled).items()}
    rewarded = [trajectory for trajectory in sampled if trajectory.reward is not None]
    named = {name: value for name, value in custom_metrics(rewarded).items() if name.startswith("episode/")}
    metrics |= {f"eval/{name}": value for name, value in named.items()}
    versions = [version for _, _, trajectory in episodes for version in _versions(trajectory)]
    if versions:
        metrics["eval/version_min"], metrics["eval/version_max"] = float(min(versions)), float(max(versions))
    return metrics

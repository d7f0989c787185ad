"""What came of an evaluation, in numbers.

Failed episodes (errors, time-outs) have no reward and are no part of a mean; how many there were stands
beside it, and `reward_if_failures_were_0` says how low the mean would be if each were worth nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from tidegate.evaluation.sampler import SampledEpisode
from tidegate.evaluation.stats import estimate, pass_at_k
from tidegate.types import Outcome


@dataclass(frozen=True, slots=True)
class Grading:
    """What an episode leaves in the books."""

    task_id: str
    env: str
    outcome: Outcome
    reward: float | None
    parts: Mapping[str, float]
    metrics: Mapping[str, float]
    tokens: int


@dataclass(slots=True)
class EvalResults:
    """Counts the episodes of every held-out set; right is a reward of at least `threshold`."""

    threshold: float
    ks: Sequence[int]
    gradings: dict[str, list[Grading]] = field(default_factory=lambda: defaultdict(list))

    def add(self, episode: SampledEpisode) -> None:
        one = episode.trajectory
        self.gradings[episode.eval_set].append(
            Grading(
                episode.task.id, episode.task.env, one.outcome, one.reward, one.reward_parts, one.metrics,
                one.sampled_tokens(),
            )
        )  # fmt: skip

    def summary(self, eval_set: str) -> dict[str, Any]:
        """One set's numbers, fit for JSON. `reward` is the mean of the tasks' means."""
        gradings = self.gradings[eval_set]
        graded = [one for one in gradings if one.reward is not None]
        found: dict[str, Any] = {
            "tasks": len({one.task_id for one in gradings}),
            "episodes": len(gradings),
            "failed": len(gradings) - len(graded),
            "outcomes": dict(Counter(one.outcome.value for one in gradings)),
        }
        if not graded:
            return found
        rewards = _by_task((one.task_id, one.reward) for one in graded)
        found["reward"] = estimate([fmean(values) for values in rewards.values()]).to_json()
        if len(graded) < len(gradings):
            worst = _by_task((one.task_id, one.reward or 0.0) for one in gradings)
            found["reward_if_failures_were_0"] = fmean(fmean(values) for values in worst.values())
        found["pass"] = self._pass(rewards)
        envs = _by_key((one.env, one.reward) for one in graded)
        if len(envs) > 1:
            found["reward_by_env"] = envs
        found["parts"] = _by_key(pair for one in graded for pair in one.parts.items())
        found["metrics"] = _by_key(pair for one in graded for pair in one.metrics.items())
        if tokens := sum(one.tokens for one in gradings):
            found["sampled_tokens"] = tokens
        return found

    def _pass(self, rewards: Mapping[str, Sequence[float]]) -> dict[str, Any]:
        """pass@k over the tasks that have k graded samples."""
        found = {}
        for k in self.ks:
            values = [
                pass_at_k(len(ones), sum(one >= self.threshold for one in ones), k)
                for ones in rewards.values()
                if len(ones) >= k
            ]
            if values:
                found[str(k)] = estimate(values).to_json()
        return found


def _by_task(pairs: Iterable[tuple[str, float | None]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for task_id, reward in pairs:
        assert reward is not None
        found[task_id].append(reward)
    return found


def _by_key(pairs: Iterable[tuple[str, float | None]]) -> dict[str, float]:
    """The mean of each key's values, over the episodes that have it."""
    return {key: fmean(values) for key, values in sorted(_by_task(pairs).items())}

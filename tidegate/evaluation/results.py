"""Aggregates the episodes of an evaluation, and formats the results as text.

Failed episodes have no reward and are not included in means; their number is reported separately, and
`reward_if_failures_were_0` is the mean that would result if each were worth 0.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from tidegate.evaluation.sampler import SampledEpisode
from tidegate.evaluation.stats import estimate, pass_at_k
from tidegate.types import Trajectory


@dataclass(slots=True)
class EvalResults:
    """Collects the episodes of every held-out set. A reward of at least `threshold` counts as right."""

    threshold: float
    ks: Sequence[int]
    episodes: dict[str, list[Trajectory]] = field(default_factory=lambda: defaultdict(list))
    """By held-out set, without turns and texts, as an evaluation may have thousands of episodes."""
    tokens: Counter[str] = field(default_factory=Counter)
    """Sampled tokens."""

    def add(self, episode: SampledEpisode) -> None:
        self.tokens[episode.eval_set] += episode.trajectory.sampled_tokens()
        brief = replace(
            episode.trajectory, turns=[], messages=[], tool_calls=[], output=None, error=None, metadata={}
        )
        self.episodes[episode.eval_set].append(brief)

    def summary(self, eval_set: str) -> dict[str, Any]:
        """Returns one set's results for JSON. `reward` is the mean of the tasks' mean rewards."""
        episodes = self.episodes[eval_set]
        graded = [episode for episode in episodes if episode.reward is not None]
        summary: dict[str, Any] = {
            "tasks": len({episode.task_id for episode in episodes}),
            "episodes": len(episodes),
            "failed": len(episodes) - len(graded),
            "outcomes": dict(Counter(episode.outcome.value for episode in episodes)),
        }
        if not graded:
            return summary
        rewards = _grouped((episode.task_id, episode.reward) for episode in graded)
        summary["reward"] = estimate([fmean(values) for values in rewards.values()]).to_json()
        if len(graded) < len(episodes):
            worst = _grouped((episode.task_id, episode.reward or 0.0) for episode in episodes)
            summary["reward_if_failures_were_0"] = fmean(fmean(values) for values in worst.values())
        summary["pass"] = self._pass(rewards)
        envs = _means((episode.env, episode.reward) for episode in graded)
        if len(envs) > 1:
            summary["reward_by_env"] = envs
        summary["parts"] = _means(pair for episode in graded for pair in episode.reward_parts.items())
        summary["metrics"] = _means(pair for episode in graded for pair in episode.metrics.items())
        if tokens := self.tokens[eval_set]:
            summary["sampled_tokens"] = tokens
        return summary

    def _pass(self, rewards: Mapping[str, Sequence[float]]) -> dict[str, Any]:
        """Returns pass@k over the tasks with at least k graded samples."""
        estimates = {}
        for k in self.ks:
            values = [
                pass_at_k(len(samples), sum(reward >= self.threshold for reward in samples), k)
                for samples in rewards.values()
                if len(samples) >= k
            ]
            if values:
                estimates[str(k)] = estimate(values).to_json()
        return estimates


def _grouped(pairs: Iterable[tuple[str, float | None]]) -> dict[str, list[float]]:
    groups: dict[str, list[float]] = defaultdict(list)
    for key, value in pairs:
        assert value is not None
        groups[key].append(value)
    return groups


def _means(pairs: Iterable[tuple[str, float | None]]) -> dict[str, float]:
    """Returns the mean of each key's values, over the episodes that have it."""
    return {key: fmean(values) for key, values in sorted(_grouped(pairs).items())}


def result_lines(results: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of an evaluation's `results.json`."""
    sampling = results["sampling"]
    how = f"temperature {sampling['temperature']:g}" if sampling else "the agent's own sampling"
    samples = results["samples"]
    times = "one sample" if samples == 1 else f"{samples} samples"
    yield f"{results['target']}: {results['env']['use']} × {results['agent']['use']}, {times} a task, {how}"
    if results["status"] != "completed":
        yield f"{results['status']}: these are the episodes until then"
    for name, summary in results["sets"].items():
        failed = f", {summary['failed']:,} failed" if summary["failed"] else ""
        yield f"  {name}: {summary['tasks']:,} tasks, {summary['episodes']:,} episodes{failed}"
        yield from _numbers(summary)
    for reason, number in results["failures"].items():
        yield f"  failed {number:,}×: {reason}"


def _numbers(summary: Mapping[str, Any]) -> Iterator[str]:
    if "reward" in summary:
        yield _format("reward", summary["reward"])
    if "reward_if_failures_were_0" in summary:
        yield f"    {'reward if failures were 0':<26}{summary['reward_if_failures_were_0']:.4f}"
    for k, found in summary.get("pass", {}).items():
        yield _format(f"pass@{k}", found)
    for key in ("reward_by_env", "metrics"):
        for name, value in summary.get(key, {}).items():
            yield f"    {name:<26}{value:.4f}"


def _format(name: str, estimate: Mapping[str, Any]) -> str:
    interval = f"{estimate['level']:.0%} [{estimate['low']:.4f}, {estimate['high']:.4f}]"
    return f"    {name:<26}{estimate['mean']:.4f}   {interval}  {estimate['method']}"

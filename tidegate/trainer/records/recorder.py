"""Records a run: one line of metrics per step, its episodes, and notes to the observer."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tidegate.envs.base import RESERVED_NAMES
from tidegate.observer import Observer
from tidegate.trainer.batch.batcher import Batch
from tidegate.trainer.batch.credit import is_zero_variance
from tidegate.trainer.ledger.entries import State
from tidegate.trainer.records.judge import PREFIX, JudgeRecord
from tidegate.trainer.records.metrics import MetricsLog
from tidegate.trainer.records.trajectories import TrajectoryFiles
from tidegate.trainer.records.writer import FileWriter
from tidegate.turn import Logprobs, Turn
from tidegate.types import Trajectory

NGRAM = 4
"""Tokens of an n-gram whose repetitions are counted."""


@dataclass(slots=True)
class Recorder:
    """Writes the metrics and episodes of steps. `snapshot()` returns the run's current counts."""

    log: MetricsLog
    files: TrajectoryFiles
    observer: Observer
    snapshot: Callable[[], dict[str, float]]
    version: Callable[[], int]
    judge: JudgeRecord = field(default_factory=JudgeRecord)
    writer: FileWriter = field(default_factory=FileWriter)
    _steps_at: dict[int, int] = field(default_factory=dict)
    """Version → number of steps in its weights."""
    _previous: dict[str, float] = field(init=False)
    """The snapshot of the previous line."""

    def __post_init__(self) -> None:
        self._previous = self.snapshot()

    async def evaluated(self, metrics: dict[str, float]) -> None:
        """Add an evaluation to the newest step's line."""
        line = await self.writer.run(self.log.add_to_last, metrics)
        # Without the step's own metrics, which the observer has had.
        self.observer.step({key: line[key] for key in ("step", "version", "time")} | metrics)

    async def step(self, step: int, metrics: dict[str, float]) -> None:
        """Write the step's line. Step 0 is the evaluation before the first step."""
        line = self.line(step, metrics)
        await self.writer.run(self.log.append, line)
        self.observer.step(line)

    def line(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        """Return the step's line: its metrics, and the counts since the line before."""
        version = self.version()
        self._steps_at.setdefault(version, step)
        now = self.snapshot()
        head = {"step": step, "version": version, "time": time.time()}
        line = {**head, **metrics, **self.judge.metrics(), **now, **_lost(now, self._previous)}
        self._previous = now
        return line

    async def batch(self, batch: Batch, step: int) -> None:
        """Write the batch's episodes."""
        await self.writer.run(self.files.batch, batch, step)

    def note(self, text: str) -> None:
        self.observer.note(text)

    def batch_metrics(self, batch: Batch, step: int) -> dict[str, float]:
        """Return metrics of the batch: rewards, staleness, versions, lengths and dropped groups."""
        trained = [episode for group in batch.groups for episode in group.trajectories]
        dropped = [episode for group, _ in batch.dropped for episode in group.trajectories]
        rewards = [episode.reward for episode in trained + dropped if episode.reward is not None]
        self.judge.add(trained + dropped)
        return {
            "time/wait_for_batch": batch.waited_s,
            "time/batch_queue": batch.queued_s,
            **_statistics("staleness", batch.staleness, ("mean", "max")),
            **_statistics("staleness_steps", self._ages_in_steps(batch, step - 1), ("mean", "max")),
            # Includes filtered groups, as the trend would be biased without those of equal rewards.
            **_statistics("reward", rewards, ("mean", "std")),
            **_zero_variance(batch),
            **custom_metrics(trained + dropped),
            **{f"policy/{name}": value for name, value in policy_rewards(trained + dropped).items()},
            **_policy_staleness(trained, batch.version),
            **tool_metrics(trained + dropped),
            **_statistics("time/outside_model", map(share_outside_model, trained + dropped), ("mean",)),
            **_versions(trained),
            **length_metrics(trained),
            "length/cut_ratio": cut_ratio(trained + dropped),
            **repetition_metrics(trained + dropped),
            **_turns(trained),
            **_selection(trained, dropped),
            **_teacher(trained, batch.scored_s),
        }

    def _ages_in_steps(self, batch: Batch, taken: int) -> list[int]:
        """Return each group's staleness in steps, for a batch assembled after `taken` steps.

        Groups from before a resume are left out, as the steps of their versions are unknown.
        """
        self._steps_at.setdefault(batch.version, taken)
        steps = [self._steps_at.get(batch.version - age) for age in batch.staleness]
        return [taken - step for step in steps if step is not None]


def age_metrics(ages: Mapping[int, int]) -> dict[str, float]:
    """Return mean and maximum staleness of the groups that were dropped as stale."""
    if not ages:
        return {}
    mean = sum(age * groups for age, groups in ages.items()) / sum(ages.values())
    return {"staleness_dropped/mean": mean, "staleness_dropped/max": float(max(ages))}


def _lost(now: dict[str, float], previous: dict[str, float]) -> dict[str, float]:
    """Return the number of groups lost since the previous line, by cause."""
    return {
        f"selection/{state}_groups": now[name] - previous.get(name, 0.0)
        for state in (State.STALE, State.FILTERED, "filtered_solved", "filtered_failed", State.FAILED)
        if (name := f"groups/{state}") in now
    }


def _zero_variance(batch: Batch) -> dict[str, float]:
    """Return the share of finished groups with equal rewards, filtered or not, and of those that are all
    solved (a reward above 0) or all failed."""
    groups = [*batch.groups, *(group for group, _ in batch.dropped)]
    equal = [rewards[0] for group in groups if is_zero_variance(rewards := group.rewards())]
    solved = sum(reward > 0 for reward in equal)
    return {
        "reward/zero_variance_ratio": len(equal) / len(groups),
        "reward/all_solved_ratio": solved / len(groups),
        "reward/all_failed_ratio": (len(equal) - solved) / len(groups),
    }


def _statistics(name: str, values: Iterable[float], statistics: tuple[str, ...]) -> dict[str, float]:
    array = np.array(list(values), dtype=np.float64)
    return {f"{name}/{key}": float(getattr(array, key)()) for key in statistics} if len(array) else {}


def custom_metrics(episodes: list[Trajectory]) -> dict[str, float]:
    """Return the means of reward parts and of the metrics that agents and rewards reported.

    They are named `reward/<part>`, `episode/<name>`, and `reward/<env>` if there are several environments.
    """
    values: dict[str, list[float]] = {}
    envs = {episode.env for episode in episodes}
    several = len(envs) > 1
    taken = {*RESERVED_NAMES, *(envs if several else ())}
    for episode in episodes:
        if several and episode.reward is not None:
            values.setdefault(f"reward/{episode.env}", []).append(episode.reward)
        for name, value in episode.reward_parts.items():
            if name not in taken:  # agents may post parts of any name
                values.setdefault(f"reward/{name}", []).append(value)
        for name, value in episode.metrics.items():
            if name.startswith(PREFIX):  # costs, which `JudgeRecord` adds up
                continue
            values.setdefault(f"episode/{name}", []).append(value)
    return {name: float(np.mean(reported)) for name, reported in sorted(values.items())}


def policy_rewards(episodes: Iterable[Trajectory]) -> dict[str, float]:
    """Return the mean rewards of several policies as `<name>/reward`, over the episodes with a turn of it.

    A policy's reward is its own, or else the episode's, plus those of its turns.
    """
    values: dict[str, list[float]] = {}
    for episode in episodes:
        for name in {turn.policy for turn in episode.turns} - {""} if episode.reward is not None else ():
            own = sum(turn.reward for turn in episode.turns if turn.policy == name)
            reward = episode.policy_rewards.get(name, episode.reward)
            values.setdefault(f"{name}/reward", []).append(float(reward or 0.0) + own)
    return {name: float(np.mean(rewards)) for name, rewards in sorted(values.items())}


def _policy_staleness(trained: Iterable[Trajectory], version: int) -> dict[str, float]:
    """Return mean and maximum age of each policy's oldest token, over the episodes that it is trained on."""
    ages: dict[str, list[int]] = {}
    for episode in trained:
        oldest: dict[str, int] = {}
        for turn in episode.trainable_turns():
            if turn.policy and (first := turn.oldest_version()) is not None:
                oldest[turn.policy] = min(first, oldest.get(turn.policy, first))
        for name, first in oldest.items():
            ages.setdefault(name, []).append(version - first)
    found: dict[str, float] = {}
    for name, values in sorted(ages.items()):
        found |= _statistics(f"policy/{name}/staleness", values, ("mean", "max"))
    return found


def tool_metrics(episodes: list[Trajectory]) -> dict[str, float]:
    """Return the calls of environments' tools and the errors among them, by tool, and their mean seconds per
    episode. Names that no environment has are counted as `unknown`."""
    counts: Counter[str] = Counter()
    for call in (call for episode in episodes for call in episode.tool_calls):
        name = call.name if call.known else "unknown"
        counts[f"tools/{name}_calls"] += 1
        counts[f"tools/{name}_errors"] += call.error
    if not counts:
        return {}
    seconds = [sum(call.seconds for call in episode.tool_calls) for episode in episodes]
    return {"time/tool": float(np.mean(seconds)), **{name: float(counts[name]) for name in sorted(counts)}}


def share_outside_model(episode: Trajectory) -> float:
    """Returns the share of an episode's time in which none of its requests was at the model, in [0, 1]."""
    at_model = end = 0.0
    for started, ended in sorted((turn.started, turn.started + turn.seconds) for turn in episode.turns):
        at_model += max(0.0, ended - max(started, end))
        end = max(end, ended)
    return max(0.0, 1.0 - at_model / episode.seconds) if episode.seconds > 0 else 0.0


def _versions(trained: list[Trajectory]) -> dict[str, float]:
    """Return version metrics; `mixed_ratio` and `mixed_turn_ratio` are the shares of trajectories and turns
    with tokens of several versions."""
    turns = [turn for episode in trained for turn in episode.trainable_turns()]
    mixed_turns = [len({span.version for span in turn.version_spans}) > 1 for turn in turns]
    mixed = [
        len({span.version for turn in episode.trainable_turns() for span in turn.version_spans}) > 1
        for episode in trained
    ]
    versions = np.concatenate([turn.token_versions() for turn in turns])
    return {
        **_statistics("weight_version", versions, ("min", "max", "mean", "std")),
        "weight_version/mixed_ratio": float(np.mean(mixed)),
        "weight_version/mixed_turn_ratio": float(np.mean(mixed_turns)),
    }


def _teacher(trained: list[Trajectory], waited_s: float) -> dict[str, float]:
    """Return the distance of the sampling policy from the teacher, if there is one; also by environment, if
    there are several."""
    by_env: dict[str, list[Turn]] = {}
    for episode in trained:
        by_env.setdefault(episode.env, []).extend(
            turn for turn in episode.trainable_turns() if turn.teacher_logprobs is not None
        )
    turns = [turn for of_env in by_env.values() for turn in of_env]
    if not turns:
        return {}
    logprobs = np.concatenate([_trained(turn, turn.teacher_logprobs) for turn in turns])
    several = {f"teacher/kl_{env}": _kl(of_env) for env, of_env in sorted(by_env.items()) if of_env}
    return {
        "time/teacher": waited_s,
        "teacher/kl": _kl(turns),
        "teacher/logprob": float(logprobs.mean(dtype=np.float64)),
        **(several if len(by_env) > 1 else {}),
    }


def _kl(turns: list[Turn]) -> float:
    """Return the mean of log μ − log p_teacher over the trained tokens."""
    distances = [_trained(turn, turn.logprobs) - _trained(turn, turn.teacher_logprobs) for turn in turns]
    return float(np.concatenate(distances).mean(dtype=np.float64))


def _trained(turn: Turn, values: Logprobs | None) -> Logprobs:
    """Return the values of a turn's tokens that are trained on."""
    assert values is not None
    return values if turn.output_mask is None else values[turn.output_mask != 0]


def _turns(trained: list[Trajectory]) -> dict[str, float]:
    turns = [sum(1 for _ in episode.trainable_turns()) for episode in trained]
    cached = sum(turn.cached_tokens for episode in trained for turn in episode.turns)
    prompts = sum(len(episode.prompt_ids(turn)) for episode in trained for turn in episode.turns)
    return {
        **_statistics("turns", turns, ("mean", "max")),
        **_tool_calls(trained),
        "truncated_ratio": float(np.mean([episode.outcome == "truncated" for episode in trained])),
        "cache/hit_ratio": cached / max(1, prompts),
    }


def _tool_calls(trained: list[Trajectory]) -> dict[str, float]:
    """Return tool calls per episode, on its newest branch, and the share of malformed turns with calls."""
    calls = [sum(len(message.get("tool_calls") or ()) for message in ep.messages) for ep in trained]
    parses = [turn.parse for ep in trained for turn in ep.trainable_turns() if turn.parse is not None]
    return {
        **_statistics("tool_calls", calls, ("mean", "max")),
        "tool_calls/malformed_ratio": parses.count("malformed") / max(1, len(parses)),
    }


def _selection(trained: list[Trajectory], dropped: list[Trajectory]) -> dict[str, float]:
    """Compare trained with dropped episodes, to show a selection bias."""
    metrics = {"selection/dropped_ratio": len(dropped) / (len(trained) + len(dropped))}
    for name, episodes in (("trained", trained), ("dropped", dropped)):
        if episodes:
            lengths = [episode.sampled_tokens() for episode in episodes]
            metrics[f"selection/{name}_length"] = float(np.mean(lengths))
        if rewards := [episode.reward for episode in episodes if episode.reward is not None]:
            metrics[f"selection/{name}_reward"] = float(np.mean(rewards))
    return metrics


def length_metrics(trained: Sequence[Trajectory]) -> dict[str, float]:
    """Return statistics of the sampled tokens per episode; quantiles are interpolated linearly."""
    lengths = np.array([episode.sampled_tokens() for episode in trained], dtype=np.float64)
    if not len(lengths):
        return {}
    p50, p95 = np.quantile(lengths, (0.5, 0.95))
    return {
        "tokens/sampled": float(lengths.sum()),
        "length/mean": float(lengths.mean()),
        "length/p50": float(p50),
        "length/p95": float(p95),
        "length/max": float(lengths.max()),
    }


def cut_ratio(episodes: Sequence[Trajectory]) -> float:
    """Return the share of episodes whose last delivered reply ended at its token limit or at the context."""
    return sum(episode.cut() for episode in episodes) / max(1, len(episodes))


def repetition_metrics(episodes: Iterable[Trajectory]) -> dict[str, float]:
    """Return mean and maximum of `repeated_share` over the episodes that have an n-gram."""
    shares = [share for episode in episodes if (share := repeated_share(episode)) is not None]
    return {"repetition/mean": float(np.mean(shares)), "repetition/max": max(shares)} if shares else {}


def repeated_share(episode: Trajectory) -> float | None:
    """Return the share of an episode's sampled n-grams that occurred earlier in it.

    This is seq-rep-n (Welleck et al., Neural Text Generation with Unlikelihood Training, 2020, eq. 10) with
    n = NGRAM, over all trainable replies of the episode; no n-gram reaches from one reply into the next.

    Returns:
        1 − distinct n-grams ÷ n-grams; None if no reply has NGRAM tokens.
    """
    grams = [gram for turn in episode.trainable_turns() for gram in _ngrams(turn.output_ids.tolist())]
    return 1 - len(set(grams)) / len(grams) if grams else None


def _ngrams(ids: Sequence[int]) -> Iterable[tuple[int, ...]]:
    return zip(*(ids[start:] for start in range(NGRAM)), strict=False)

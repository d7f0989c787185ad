"""What a run writes down of itself: one flat line of metrics a step, the episodes, and the view's news."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from tidegate.envs.base import RESERVED_NAMES
from tidegate.observer import Observer
from tidegate.trainer.admission.state import BatchSelection
from tidegate.trainer.batch.advantage import is_zero_variance
from tidegate.trainer.batch.batcher import Batch
from tidegate.trainer.ledger.entries import State
from tidegate.trainer.records.metrics import MetricsLog
from tidegate.trainer.records.trajectories import TrajectoryFiles
from tidegate.types import Trajectory


@dataclass(slots=True)
class Recorder:
    """`snapshot()` gives the groups by state and what else holds at this moment."""

    log: MetricsLog
    files: TrajectoryFiles
    observer: Observer
    snapshot: Callable[[], dict[str, float]]
    version: Callable[[], int]
    _made_after: dict[int, int] = field(default_factory=dict)
    """Version → the optimiser steps after which its weights were published."""
    _before: dict[str, float] = field(init=False)
    """The snapshot of the line before."""

    def __post_init__(self) -> None:
        self._before = self.snapshot()

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Write the step's line. Step 0 is the evaluation before the first step."""
        version = self.version()
        self._made_after.setdefault(version, step)
        now = self.snapshot()
        head = {"step": step, "version": version, "time": time.time()}
        line = {**head, **metrics, **now, **_lost(now, self._before)}
        self._before = now
        self.log.append(line)
        self.observer.step(line)

    def batch(self, batch: Batch, step: int) -> None:
        self.files.batch(batch, step)

    def note(self, text: str) -> None:
        self.observer.note(text)

    def batch_metrics(self, batch: Batch, step: int) -> dict[str, float]:
        """What the batch of `step` says of rewards, staleness, versions, lengths, and of what it left out."""
        trained = [one for group in batch.groups for one in group.trajectories]
        dropped = [one for group, _ in batch.dropped for one in group.trajectories]
        return {
            "time/wait_for_batch": batch.waited_s,
            "time/wait_for_policy": batch.ready_s,
            **_spread("staleness", batch.cut.staleness, ("mean", "max")),
            **_spread("staleness_steps", self._ages_in_steps(batch.cut, step - 1), ("mean", "max")),
            # Groups that were filtered because all their rewards are alike still count for the trend.
            **_spread(
                "reward", [one.reward for one in trained + dropped if one.reward is not None], ("mean", "std")
            ),
            **_alike(batch),
            **custom_metrics(trained + dropped),
            **_versions(trained),
            **_lengths(trained),
            **_selection(trained, dropped),
        }

    def _ages_in_steps(self, cut: BatchSelection, taken: int) -> list[int]:
        """Optimiser steps between the weights of each group's oldest token and the cut, at which `taken`
        steps had been taken. A group from before a resume is left out: nobody counted for it."""
        self._made_after.setdefault(cut.version, taken)
        made = [self._made_after.get(cut.version - age) for age in cut.staleness]
        return [taken - one for one in made if one is not None]


def _lost(now: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    """How many groups came to nothing since the line before, by cause."""
    return {
        f"selection/{state}_groups": now[name] - before.get(name, 0.0)
        for state in (State.STALE, State.FILTERED, State.FAILED)
        if (name := f"groups/{state}") in now
    }


def _alike(batch: Batch) -> dict[str, float]:
    """The shares of the finished groups whose rewards are all alike, whether they were filtered or not: all
    of them, and those that are all solved (a reward above 0) or all failed."""
    groups = [*batch.groups, *(group for group, _ in batch.dropped)]
    alike = [rewards[0] for group in groups if is_zero_variance(rewards := group.rewards())]
    solved = sum(reward > 0 for reward in alike)
    return {
        "reward/zero_variance_ratio": len(alike) / len(groups),
        "reward/all_solved_ratio": solved / len(groups),
        "reward/all_failed_ratio": (len(alike) - solved) / len(groups),
    }


def _spread(name: str, values: Iterable[float], which: tuple[str, ...]) -> dict[str, float]:
    found = np.array(list(values), dtype=np.float64)
    return {f"{name}/{one}": float(getattr(found, one)()) for one in which} if len(found) else {}


def custom_metrics(episodes: list[Trajectory]) -> dict[str, float]:
    """`reward/<env>` where there are several environments, `reward/<part>`, and `episode/<name>`: what agents
    and rewards told of their episodes, each the mean over those that told it."""
    values: dict[str, list[float]] = {}
    envs = {one.env for one in episodes}
    several = len(envs) > 1
    taken = {*RESERVED_NAMES, *(envs if several else ())}
    for one in episodes:
        if several and one.reward is not None:
            values.setdefault(f"reward/{one.env}", []).append(one.reward)
        for name, value in one.reward_parts.items():
            if name not in taken:  # parts that an agent posts have any name
                values.setdefault(f"reward/{name}", []).append(value)
        for name, value in one.metrics.items():
            values.setdefault(f"episode/{name}", []).append(value)
    return {name: float(np.mean(found)) for name, found in sorted(values.items())}


def _versions(trained: list[Trajectory]) -> dict[str, float]:
    """`mixed_ratio`: trajectories, `mixed_turn_ratio`: turns, with tokens of more than one version."""
    turns = [turn for one in trained for turn in one.trainable_turns()]
    mixed_turns = [len({span.version for span in turn.version_spans}) > 1 for turn in turns]
    mixed = [
        len({span.version for turn in one.trainable_turns() for span in turn.version_spans}) > 1
        for one in trained
    ]
    versions = np.concatenate([turn.token_versions() for turn in turns])
    return {
        **_spread("weight_version", versions, ("min", "max", "mean", "std")),
        "weight_version/mixed_ratio": float(np.mean(mixed)),
        "weight_version/mixed_turn_ratio": float(np.mean(mixed_turns)),
    }


def _lengths(trained: list[Trajectory]) -> dict[str, float]:
    turns = [sum(1 for _ in one.trainable_turns()) for one in trained]
    cached = sum(turn.cached_tokens for one in trained for turn in one.turns)
    prompts = sum(len(one.prompt_ids(turn)) for one in trained for turn in one.turns)
    return {
        "tokens/sampled": float(sum(one.sampled_tokens() for one in trained)),
        **_spread("length", [one.sampled_tokens() for one in trained], ("mean", "max")),
        **_spread("turns", turns, ("mean", "max")),
        **_tool_calls(trained),
        "truncated_ratio": float(np.mean([one.outcome == "truncated" for one in trained])),
        "cache/hit_ratio": cached / max(1, prompts),
    }


def _tool_calls(trained: list[Trajectory]) -> dict[str, float]:
    """Calls on the newest branch of each episode; `malformed_ratio` is of the turns that wrote any."""
    calls = [sum(len(said.get("tool_calls") or ()) for said in one.messages) for one in trained]
    written = [turn.parse for one in trained for turn in one.trainable_turns() if turn.parse is not None]
    return {
        **_spread("tool_calls", calls, ("mean", "max")),
        "tool_calls/malformed_ratio": written.count("malformed") / max(1, len(written)),
    }


def _selection(trained: list[Trajectory], dropped: list[Trajectory]) -> dict[str, float]:
    """Trained against dropped work, so that a selection bias shows."""
    found = {"selection/dropped_ratio": len(dropped) / (len(trained) + len(dropped))}
    for name, ones in (("trained", trained), ("dropped", dropped)):
        if ones:
            found[f"selection/{name}_length"] = float(np.mean([one.sampled_tokens() for one in ones]))
        if rewards := [one.reward for one in ones if one.reward is not None]:
            found[f"selection/{name}_reward"] = float(np.mean(rewards))
    return found

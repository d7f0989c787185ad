"""Histograms by step of episodes' reward, length, staleness and advantage."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tidegate.viewer.chart import ticks
from tidegate.viewer.dashboard.records import EpisodeSummary
from tidegate.viewer.dashboard.run import FollowedRun, Number

MOST_STEPS = 80
"""Steps that are shown; of a longer run every second, fourth, eighth … step, and the newest one."""
BUDGET_S = 2.0
"""Time after which a request returns the steps that it has read; the next one continues."""
MOST_LEVELS = 12
"""Up to this number of different values, each has a bin of its own."""
BINS = 24

Which = Literal["all", "trained"]
TRAINED = ("trained", "stepped")


@dataclass(frozen=True, slots=True)
class Quantity:
    """What is counted: `value` is an episode's, or None if it has none."""

    name: str
    unit: str
    note: str
    value: Callable[[FollowedRun, EpisodeSummary], float | None]


def _staleness(run: FollowedRun, episode: EpisodeSummary) -> float | None:
    group = run.ledger.groups.get(episode.group)
    age = None if group is None else group.end.get("staleness")
    return None if age is None else float(age)


def _advantage(_: FollowedRun, episode: EpisodeSummary) -> float | None:
    return episode.advantage if episode.state == "stepped" else None


QUANTITIES = (
    Quantity("Reward", "reward", "Of each episode with a reward.", lambda _, one: one.reward),
    Quantity("Length", "sampled tokens", "Tokens sampled in an episode, over all its turns.",
             lambda _, one: float(one.tokens)),
    Quantity("Staleness", "policy versions", "Of the episode's group when its batch was assembled.",
             _staleness),
    Quantity("Advantage", "advantage", "Of the episodes that were trained on.", _advantage),
)  # fmt: skip

Values = dict[str, list[float]]


def distributions(run: FollowedRun, which: Which = "all", step: Number | None = None) -> dict[str, Any]:
    """Returns histograms of the run's steps, or of one.

    Args:
        run: The run.
        which: All episodes that came with a step's batch, or those trained on.
        step: The only step; by default MOST_STEPS of the run, evenly spaced.

    Returns:
        The `steps`, the histograms of each quantity over them, the number of steps of the run, and how many
        of those to be shown are `unread` because the time was over.
    """
    run.refresh()
    written = _written(run)
    wanted = shown_steps(written) if step is None else [number for number in written if number == step]
    deadline = time.monotonic() + BUDGET_S
    columns: dict[int, Values] = {}
    for number in wanted:
        if columns and time.monotonic() > deadline:
            break
        columns[number] = _values(run, number, which)
    return {
        "steps": list(columns),
        "of": len(written),
        "unread": len(wanted) - len(columns),
        "quantities": [
            {"name": one.name, "unit": one.unit, "note": one.note}
            | histograms([values[one.name] for values in columns.values()])
            for one in QUANTITIES
        ],
    }


def _written(run: FollowedRun) -> list[int]:
    last = run.files.last("step")
    return [number for number in run.records.numbers("step") if last is None or number <= last]


def shown_steps(steps: Sequence[int]) -> list[int]:
    """Returns at most MOST_STEPS steps: multiples of a power of two, so that few change as a run grows."""
    stride = 1
    while len(steps) > stride * (MOST_STEPS - 1):
        stride *= 2
    return [step for index, step in enumerate(steps) if index % stride == 0 or index == len(steps) - 1]


def _values(run: FollowedRun, step: int, which: Which) -> Values:
    values: Values = {one.name: [] for one in QUANTITIES}
    for episode in run.records.file("step", step).summaries:
        if which == "trained" and run.state_of(episode) not in TRAINED:
            continue
        for quantity in QUANTITIES:
            value = quantity.value(run, episode)
            if value is not None:
                values[quantity.name].append(value)
    return values


def histograms(columns: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Returns one histogram for each column of values, all with the same bins.

    Returns:
        `edges` of the bins (one more than bins), or `levels` where each value has a bin of its own (the other
        one is None); and by column `counts` by bin, `mean`, `low` and `high` (10th and 90th percentiles).
    """
    arrays = [np.asarray(column, dtype=np.float64) for column in columns]
    levels = np.unique(np.concatenate([*arrays, np.empty(0)]))
    few = len(levels) <= MOST_LEVELS
    edges = np.empty(0) if few else _edges(float(levels[0]), float(levels[-1]))
    return {
        "levels": [float(f"{value:.4g}") for value in levels] if few else None,
        "edges": None if few else [float(f"{edge:.6g}") for edge in edges],
        "counts": [_counts(array, levels, edges) for array in arrays],
        **{
            name: [_rounded(measure(array), array) if len(array) else None for array in arrays]
            for name, measure in MEASURES.items()
        },
    }


MEASURES: dict[str, Callable[[npt.NDArray[np.float64]], float]] = {
    "mean": lambda array: float(array.mean()),
    "low": lambda array: float(np.percentile(array, 10)),
    "high": lambda array: float(np.percentile(array, 90)),
}


def _rounded(value: float, array: npt.NDArray[np.float64]) -> float:
    """Returns four digits of a value; 0 where only rounding errors of the values are left."""
    return 0.0 if abs(value) < 1e-9 * float(np.abs(array).max()) else float(f"{value:.4g}")


def _edges(low: float, high: float) -> npt.NDArray[np.float64]:
    """Returns the edges of about BINS bins of a round width."""
    marks = ticks(low, high, BINS)
    width = marks[1] - marks[0]
    first, last = np.floor(low / width + 1e-9), np.floor(high / width + 1e-9) + 1
    edges: npt.NDArray[np.float64] = np.arange(first, last + 1) * width
    return edges


def _counts(
    array: npt.NDArray[np.float64], levels: npt.NDArray[np.float64], edges: npt.NDArray[np.float64]
) -> list[int]:
    if len(edges):
        found: list[int] = np.histogram(array, edges)[0].tolist()
        return found
    return np.bincount(np.searchsorted(levels, array), minlength=len(levels)).tolist() if len(levels) else []

"""Curves of any metric, over steps, sampled tokens or hours, for one run or several."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import Query

from tidegate.viewer.chart import STEP, Point, Series, rounded, thinned
from tidegate.viewer.dashboard.run import FollowedRun
from tidegate.viewer.formatting import printable
from tidegate.viewer.run_files import RunFiles

Axis = Literal["step", "tokens", "hours"]
Keys = Annotated[list[str], Query(max_length=60)]

AXES: dict[Axis, str] = {"step": STEP, "tokens": "sampled tokens", "hours": "hours"}
NO_METRICS = ("step", "time")
UNITS = (
    ("time/", "seconds"), ("eval/seconds", "seconds"), ("tokens/", "tokens"), ("length/", "tokens"),
    ("staleness_steps/", "steps"), ("staleness/", "policy versions"), ("weight_version/", "policy version"),
    ("groups/", "groups"), ("attempts/", "attempts"), ("failures/", "attempts"), ("reward/", "reward"),
    ("eval/reward", "reward"), ("eval/episodes", "episodes"), ("turns/", "turns"), ("tool_calls/", "calls"),
    ("repetition/", "share of 4-grams"), ("entropy", "nats per token"), ("lag_kl", "nats per token"),
    ("logprob_drift", "nats per token"), ("unlisted_mass", "probability"),
    ("mismatch_kl", "nats per token"), ("reference_kl", "nats per token"), ("teacher/kl", "nats per token"),
    ("selection/", ""), ("episode/", "mean per episode"),
)  # fmt: skip
"""Units of metrics by the beginning of their names."""


def unit_of(key: str) -> str:
    """Returns the title of a metric's axis; empty if it has none."""
    if key.endswith(("_ratio", "_fraction")):
        return "share"
    return next((unit for start, unit in UNITS if key.startswith(start)), "")


def metrics(runs: Sequence[FollowedRun]) -> list[dict[str, Any]]:
    """Returns the metrics that any of the runs has, with the newest value of each run, by name."""
    newest = [_newest(run) for run in runs]
    keys = sorted({key for values in newest for key in values})
    return [{"key": printable(key), "last": [values.get(key) for values in newest]} for key in keys]


def _newest(run: FollowedRun) -> dict[str, float]:
    def collect() -> dict[str, float]:
        values: dict[str, float] = {}
        for row in run.files.rows:
            values |= row
        return {key: value for key, value in values.items() if key not in NO_METRICS}

    found: dict[str, float] = run.cached("newest", collect)
    return found


def curves(runs: Sequence[FollowedRun], keys: Sequence[str], axis: Axis) -> dict[str, Any]:
    """Returns a curve of each run for each metric; a run without the metric has no points."""
    files = []
    for run in runs:
        with run.lock:
            run.refresh()
            files.append((run.files, run.starts()))
    places = [_places(one, axis, starts) for one, starts in files]
    return {
        "axis": AXES[axis],
        "curves": [
            {
                "key": printable(key),
                "unit": unit_of(key),
                "runs": [_curve(one, key, place) for (one, _), place in zip(files, places, strict=True)],
            }
            for key in keys
        ],
    }


def _places(files: RunFiles, axis: Axis, starts: Sequence[float]) -> list[Point]:
    """Returns the position on the axis of each step; empty if that is the step itself."""
    if axis == "tokens":
        return files.tokens_by_step()
    if axis == "hours":
        return [(step, seconds / 3600) for step, seconds in files.seconds_by_step(starts)]
    return []


def _curve(files: RunFiles, key: str, places: Sequence[Point]) -> list[Point]:
    points = files.series(key)
    if places:
        steps = [step for step, _ in places]
        at = [(bisect_right(steps, step), value) for step, value in points]
        points = [(places[index - 1][1], value) for index, value in at if index]
    return rounded(thinned(Series(key, points, peak=key.endswith("/max"))).points)

"""A run's evaluations with intervals, and two of them compared task by task."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query

from tidegate.evaluation.stats import estimate
from tidegate.viewer.dashboard.records import EpisodeSummary
from tidegate.viewer.dashboard.run import FollowedRun, Number
from tidegate.viewer.held_out import held_out_key, held_out_names
from tidegate.viewer.run_files import eval_results

Most = Annotated[int, Query(ge=1, le=1000)]


def evaluations(run: FollowedRun) -> dict[str, Any]:
    """Returns the run's evaluations with intervals, the sets and modes of the first and last one, and the
    results of `tidegate eval`."""
    run.refresh()
    with run.lock:
        last = run.files.last("step")
        rows = {
            int(row.get("eval/step", row["step"])): {key: row[key] for key in row if key.startswith("eval/")}
            for row in run.files.rows
            if any(key.startswith("eval/") for key in row)
        }
    written = [number for number in run.records.numbers("eval") if last is None or number <= last]
    kinds: list[tuple[str, str]] = []
    for number in {*written[:1], *written[-1:]}:
        file = run.records.file("eval", number)
        kinds += dict.fromkeys((summary.eval_set, summary.mode) for summary in file.summaries)
    kinds = sorted(dict.fromkeys(kinds), key=lambda kind: (kind[1] == "greedy", kind[0]))
    return {
        "evaluations": [
            {
                "step": number,
                "scores": rows.get(number, {}),
                "intervals": intervals(run, number) if number in written else {},
                "written": number in written,
            }
            for number in sorted({*rows, *written})
        ],
        "names": held_out_names(key for row in rows.values() for key in row),
        "kinds": [{"set": name, "mode": mode} for name, mode in kinds],
        "results": eval_results(run.dir),
    }


def intervals(run: FollowedRun, step: int) -> dict[str, dict[str, Any]]:
    """Returns the estimate of each held-out reward of an evaluation, from its episodes, by metric.

    Each episode with a reward counts once; failed ones have none, as in the metric.
    """
    file = run.records.file("eval", step)

    def collect() -> dict[str, dict[str, Any]]:
        rewards: dict[str, list[float]] = {}
        for summary in file.summaries:
            if summary.reward is not None:
                key = held_out_key(summary.eval_set, summary.mode)
                rewards.setdefault(key, []).append(summary.reward)
        return {key: estimate(values).to_json() for key, values in rewards.items()}

    found: dict[str, dict[str, Any]] = run.kept(f"intervals {step}", file.seen, collect)
    return found


def compared(
    run: FollowedRun,
    before: Number,
    after: Number,
    set: str = "",
    mode: str = "sampled",
    task: str | None = None,
    start: Number = 0,
    most: Most = 500,
) -> dict[str, Any]:
    """Returns the problems (or only `task`) of a set and mode in two evaluations, largest gain first."""
    first, last = _by_task(run, before, set, mode), _by_task(run, after, set, mode)
    tasks = [(name, _gain(first.get(name), last.get(name))) for name in {**first, **last}]
    gains = [gain for _, gain in tasks if gain is not None]
    tasks.sort(key=lambda item: (item[1] is None, -(item[1] or 0.0)))
    selected = [(name, gain) for name, gain in tasks if task in (None, name)]
    rows = [
        {
            "task": name,
            "prompt": _prompt(first.get(name), last.get(name)),
            "gain": gain,
            "before": _short(first.get(name)),
            "after": _short(last.get(name)),
        }
        for name, gain in selected[start : start + most]
    ]
    return {
        "total": len(selected),
        "tasks": rows,
        "better": sum(gain > 0 for gain in gains),
        "same": sum(gain == 0 for gain in gains),
        "worse": sum(gain < 0 for gain in gains),
    }


def _gain(before: EpisodeSummary | None, after: EpisodeSummary | None) -> float | None:
    if before is None or after is None or before.reward is None or after.reward is None:
        return None
    return after.reward - before.reward


def _by_task(run: FollowedRun, number: int, eval_set: str, mode: str) -> dict[str, EpisodeSummary]:
    """Returns the first episode of each task."""
    episodes: dict[str, EpisodeSummary] = {}
    for summary in run.records.file("eval", number).summaries:
        if (summary.eval_set, summary.mode) == (eval_set, mode):
            episodes.setdefault(summary.task, summary)
    return episodes


def _prompt(*episodes: EpisodeSummary | None) -> str:
    return next((one.prompt for one in episodes if one is not None and one.prompt), "")


def _short(episode: EpisodeSummary | None) -> dict[str, Any] | None:
    if episode is None:
        return None
    names = ("line", "reward", "outcome", "tokens")
    return {name: getattr(episode, name) for name in names}

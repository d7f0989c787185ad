"""Data of the page that compares several runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tidegate.viewer.dashboard.curves import Axis, Keys, curves, metrics
from tidegate.viewer.dashboard.run import FollowedRun
from tidegate.viewer.formatting import printable
from tidegate.viewer.overview import shown_value
from tidegate.viewer.run_files import RunFiles
from tidegate.viewer.signs.history import WINDOW

MOST_RUNS = 12
"""As many as the page has colours and strokes for."""
OF_THE_RUN_ITSELF = ("run.name", "run.dir")
"""Settings that differ between any two runs."""


class ComparedRuns:
    """Several runs with names that tell them apart."""

    def __init__(self, runs: Sequence[FollowedRun]) -> None:
        self.runs = runs
        self.names = distinct_names([run.dir for run in runs])


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """Returns the shortest endings of the directories' paths that are all different."""
    parts = [path.resolve().parts for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(one[-count:]) for one in parts]
        if len(set(names)) == len(names):
            break
    return [printable(name) for name in names]


def state(compared: ComparedRuns) -> dict[str, Any]:
    """Returns the runs with their states; polled by the page."""
    stamps = [str(run.refresh()) for run in compared.runs]
    return {
        "stamp": " ".join(stamps),
        "runs": [
            {
                "name": name,
                "status": run.status(),
                "step": run.files.last("step"),
                "planned": run.files.planned,
                "signs": list(run.signs.current),
            }
            for name, run in zip(compared.names, compared.runs, strict=True)
        ],
    }


def metrics_of_runs(compared: ComparedRuns) -> dict[str, Any]:
    return {"metrics": metrics(compared.runs)}


def curves_of_runs(compared: ComparedRuns, key: Keys, x: Axis = "step") -> dict[str, Any]:
    return curves(compared.runs, key, x)


def differences(compared: ComparedRuns) -> dict[str, Any]:
    """Returns the settings that are not the same in all runs, with the text of each run, None if unset."""
    for run in compared.runs:
        run.refresh()
    texts = [dict(flat_settings(run.files.settings)) for run in compared.runs]
    keys = dict.fromkeys(key for settings in texts for key in settings)
    rows = [(key, [settings.get(key) for settings in texts]) for key in keys if key not in OF_THE_RUN_ITSELF]
    return {
        "total": len(rows),
        "rows": [{"key": key, "values": values} for key, values in rows if len(set(values)) > 1],
    }


def flat_settings(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields settings by dotted name, as texts; secrets are hidden."""
    for key, value in settings.items():
        name = f"{prefix}{printable(key)}"
        if isinstance(value, Mapping) and value:
            yield from flat_settings(value, f"{name}.")
        else:
            yield name, shown_value(key, value)


def finals(compared: ComparedRuns, key: Keys) -> dict[str, Any]:
    """Returns the totals of each run, and the final values of the metrics."""
    files = []
    for run in compared.runs:
        with run.lock:
            run.refresh()
            files.append((run.files, run.starts()))
    return {
        "window": WINDOW,
        "steps": [one.last("step") for one, _ in files],
        "tokens": [one.sampled_tokens() or None for one, _ in files],
        "seconds": [one.seconds(starts) for one, starts in files],
        "metrics": [
            {"key": printable(name), "values": [final_value(one, name) for one, _ in files]} for name in key
        ],
    }


def final_value(files: RunFiles, key: str) -> float | None:
    """Returns the mean over the last WINDOW steps with the metric; of an evaluation, the newest value."""
    values = [value for _, value in files.series(key)][-(1 if key.startswith("eval/") else WINDOW) :]
    return sum(values) / len(values) if values else None


VIEWS: dict[str, Callable[..., dict[str, Any]]] = {
    "state": state, "metrics": metrics_of_runs, "curves": curves_of_runs, "differences": differences,
    "finals": finals,
}  # fmt: skip

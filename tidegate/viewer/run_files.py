"""Reads the files of a run, also of one that is running or was interrupted."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from tidegate.errors import ConfigError
from tidegate.viewer.formatting import known

Row = dict[str, float]


@dataclass(slots=True)
class RunFiles:
    """What a run has written so far.

    `rows` are the metrics by step in the surviving lineage: where a resumed run took a step again, the
    newer row counts. `redone` holds the steps at which that happened. `remarks` say what could not be
    read.
    """

    dir: Path
    settings: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    redone: list[int] = field(default_factory=list)
    evaluations: list[Path] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def series(self, key: str) -> list[tuple[float, float]]:
        """(step, value) where the metric is known."""
        return [(row["step"], row[key]) for row in self.rows if key in row]

    def last(self, key: str) -> float | None:
        return next((row[key] for row in reversed(self.rows) if key in row), None)

    def seconds(self, starts: Sequence[float] = ()) -> float | None:
        """From the first row to the last. Between rows in which the run was started again, at one of
        `starts` (or where `redone` says so), the step's own time counts, not the time it stood still."""
        rows = [row for row in self.rows if "time" in row]
        if len(rows) < 2:
            return None
        total = 0.0
        for before, after in pairwise(rows):
            again = after["step"] in self.redone
            again = again or any(before["time"] < start < after["time"] for start in starts)
            total += after.get("time/step", 0.0) if again else after["time"] - before["time"]
        return total

    def sampling_rate(self) -> list[tuple[float, float]]:
        """(step, tokens a second sampled since the row before), by the running total."""
        rows = [row for row in self.rows if "tokens/sampled_total" in row and "time" in row]
        rates = []
        for before, after in pairwise(rows):
            tokens = after["tokens/sampled_total"] - before["tokens/sampled_total"]
            seconds = after["time"] - before["time"]
            if tokens >= 0 and seconds > 0:  # a resumed run counts anew
                rates.append((after["step"], tokens / seconds))
        return rates

    def sampled_tokens(self) -> float:
        """By rollouts over the whole run; a resumed one counts anew."""
        total = last = 0.0
        for _, value in self.series("tokens/sampled_total"):
            total += value - last if value >= last else value
            last = value
        return total


def read_run(run_dir: Path) -> RunFiles:
    """Read a run's directory.

    Raises ConfigError where there is no such directory, or nothing of a run in it.
    """
    run_directory(run_dir)
    run = RunFiles(run_dir)
    run.settings = read_settings(run_dir, run.remarks)
    metrics = run_dir / "metrics.jsonl"
    if metrics.exists():
        run.rows, run.redone = lineage(objects(metrics, run.remarks))
    run.evaluations = evaluations(run_dir, run.last("step"))
    return run


def run_directory(run_dir: Path) -> None:
    """Raises ConfigError where there is no such directory, or nothing of a run in it."""
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: there is no such run directory")
    if not any((run_dir / name).exists() for name in ("config.toml", "metrics.jsonl")):
        raise ConfigError(f"{run_dir} holds neither config.toml nor metrics.jsonl: it is not a run")


def read_settings(run_dir: Path, remarks: list[str]) -> dict[str, Any]:
    """What `config.toml` holds; nothing, and a remark, where it can't be read."""
    config = run_dir / "config.toml"
    if not config.exists():
        return {}
    try:
        return tomllib.loads(config.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        remarks.append(f"config.toml is not valid TOML: {error}")
        return {}


def evaluations(run_dir: Path, until: float | None = None) -> list[Path]:
    """The files of evaluations in order of steps, up to step `until`: later ones were abandoned."""
    found = sorted((run_dir / "trajectories").glob("eval_*.jsonl"))
    steps = ((path, path.stem.removeprefix("eval_")) for path in found)
    return [path for path, step in steps if step.isdigit() and (until is None or int(step) <= until)]


def objects(path: Path, remarks: list[str]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file, one a line. A line cut short is left out and remarked upon."""
    broken = 0
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                value = json.loads(line)
            except ValueError:
                broken += bool(line.strip())
                continue
            if isinstance(value, dict):
                yield value
    if broken:
        plural = "a line that is" if broken == 1 else f"{broken} lines that are"
        remarks.append(f"{path.name} has {plural} not JSON (cut short?) and left out")


def lineage(raw: Iterator[dict[str, Any]]) -> tuple[list[Row], list[int]]:
    """Rows by ascending step, one a step, and the steps to which a resumed run had gone back.

    A row of an earlier step than the last means that the run was resumed there: what it had done after
    it is abandoned. Two rows of one step (its update and its evaluation) become one.
    """
    rows: list[Row] = []
    redone: list[int] = []
    for one in raw:
        enter_row(rows, redone, one)
    return rows, redone


def enter_row(rows: list[Row], redone: list[int], line: Mapping[str, Any]) -> None:
    """Enter one more line of metrics into the lineage so far; a line without a step is left out."""
    row = {key: value for key, value in ((key, known(line[key])) for key in line) if value is not None}
    if "step" not in row:
        return
    if rows and row["step"] < rows[-1]["step"]:
        redone.append(int(row["step"]))
        while rows and rows[-1]["step"] >= row["step"]:
            rows.pop()
    if rows and rows[-1]["step"] == row["step"]:
        rows[-1].update(row)
    else:
        rows.append(row)

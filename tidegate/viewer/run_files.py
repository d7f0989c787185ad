"""Reads the files of a finished, running or interrupted run."""

from __future__ import annotations

import contextlib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from tidegate.config import ENDLESS
from tidegate.errors import ConfigError
from tidegate.service.directory_lock import FILE as LOCK
from tidegate.trainer.ledger.jsonl import parts
from tidegate.viewer.formatting import as_mapping, known, printable
from tidegate.viewer.held_out import held_out_names

Row = dict[str, float]


@dataclass(slots=True)
class RunFiles:
    """Contents of a run's files so far.

    `rows` are the metrics by step; if a resumed run repeated a step, the newer row counts. `remarks` describe
    unreadable content.
    """

    dir: Path
    settings: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def series(self, key: str) -> list[tuple[float, float]]:
        """Returns (step, value) of all rows that have the metric; of an evaluation, the evaluated step."""
        of = "eval/step" if key.startswith("eval/") else "step"
        return [(row.get(of, row["step"]), row[key]) for row in self.rows if key in row]

    def keys(self) -> set[str]:
        """Returns the metrics that any row has."""
        return set().union(*self.rows)

    def held_out(self) -> dict[str, str]:
        """Returns the held-out rewards that the run has, with their names."""
        return held_out_names(self.keys())

    @property
    def planned(self) -> int | None:
        """The limit of its steps; None without one."""
        if self.is_fine_tuning:
            return int(self.rows[-1]["sft/steps"])
        steps = self.settings.get("trainer", {}).get("steps")
        return steps if isinstance(steps, int) and steps < ENDLESS else None

    @property
    def is_fine_tuning(self) -> bool:
        """Whether it is of `tidegate sft`, whose steps have metrics of their own."""
        return bool(self.rows) and "sft/steps" in self.rows[-1]

    @property
    def by_clients(self) -> bool:
        """Whether clients run its episodes."""
        return bool(self.settings.get("agent", {}).get("source") == "client")

    def last(self, key: str) -> float | None:
        return next((row[key] for row in reversed(self.rows) if key in row), None)

    def seconds(self, starts: Sequence[float] = ()) -> float | None:
        """Returns the time from the first row to the last, without the pauses before resumptions."""
        places = self.seconds_by_step(starts)
        return places[-1][1] if len(places) > 1 else None

    def seconds_by_step(self, starts: Sequence[float] = ()) -> list[tuple[float, float]]:
        """Returns (step, seconds since the first row), without the pauses before resumptions.

        A row after a resumption (at one of `starts`) counts with its step time.
        """
        rows = [row for row in self.rows if "time" in row]
        places = [(row["step"], 0.0) for row in rows[:1]]
        for before, after in pairwise(rows):
            resumed = any(before["time"] < start < after["time"] for start in starts)
            took = after.get("time/step", 0.0) if resumed else after["time"] - before["time"]
            places.append((after["step"], places[-1][1] + took))
        return places

    def sampling_rate(self) -> list[tuple[float, float]]:
        """Returns (step, tokens per second since the previous row), from the running total."""
        rows = [row for row in self.rows if "tokens/sampled_total" in row and "time" in row]
        rates = []
        for before, after in pairwise(rows):
            tokens = after["tokens/sampled_total"] - before["tokens/sampled_total"]
            seconds = after["time"] - before["time"]
            if tokens >= 0 and seconds > 0:  # a resumed run restarts the total at 0
                rates.append((after["step"], tokens / seconds))
        return rates

    def sampled_tokens(self) -> float:
        """Returns the tokens sampled by rollouts over the whole run, across resumptions."""
        places = self.tokens_by_step()
        return places[-1][1] if places else 0.0

    def tokens_by_step(self) -> list[tuple[float, float]]:
        """Returns (step, tokens sampled by rollouts so far), across resumptions."""
        total = last = 0.0
        places = []
        for step, value in self.series("tokens/sampled_total"):
            total += value - last if value >= last else value
            last = value
            places.append((step, total))
        return places


def read_run(run_dir: Path) -> RunFiles:
    """Reads a run's directory; raises ConfigError if it does not exist or is not a run."""
    run_directory(run_dir)
    run = RunFiles(run_dir)
    run.settings = read_settings(run_dir, run.remarks)
    metrics = run_dir / "metrics.jsonl"
    if metrics.exists():
        run.rows = lineage(objects(metrics))
    return run


def run_directory(run_dir: Path) -> None:
    """Raises ConfigError if the directory does not exist or is not a run."""
    if run_dir.is_file():
        raise ConfigError(f"{run_dir} is a file; name the run's directory, such as runs/NAME")
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: there is no such run directory")
    if is_run(run_dir):
        return
    runs = [path for parent in (run_dir, run_dir / "runs") if parent.is_dir() for path in parent.iterdir()]
    found = sorted(str(path) for path in runs if is_run(path))
    raise ConfigError(
        f"{run_dir.resolve()} holds no run: a run's directory, such as runs/NAME, has config.toml, "
        f"metrics.jsonl and ledger.jsonl{f'; did you mean {found[0]}?' if found else ''}"
    )


def is_run(path: Path) -> bool:
    """Returns whether a directory has a run's files. `config.toml` alone may be that of a project."""
    starts = (path / "config.toml").exists() and (path / LOCK).exists()
    return starts or any((path / name).exists() for name in ("metrics.jsonl", "ledger.jsonl", "trajectories"))


def read_settings(run_dir: Path, remarks: list[str]) -> dict[str, Any]:
    """Returns the contents of `config.toml`; if it is invalid, adds a remark and returns {}."""
    config = run_dir / "config.toml"
    if not config.exists():
        return {}
    try:
        return tomllib.loads(config.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        remarks.append(f"config.toml is not valid TOML: {error}")
        return {}


def evaluations(run_dir: Path, until: float | None = None) -> list[Path]:
    """Returns the evaluation files in order of steps, up to `until`; later ones are of discarded steps."""
    paths = sorted((run_dir / "trajectories").glob("eval_*.jsonl"))
    steps = ((path, path.stem.removeprefix("eval_")) for path in paths)
    return [path for path, step in steps if step.isdigit() and (until is None or int(step) <= until)]


def objects(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects of a file with one per line, of all parts; skips other lines."""
    for part in parts(path):
        with part.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                with contextlib.suppress(ValueError, RecursionError):  # no JSON, or nested too deeply
                    if isinstance(value := json.loads(line), dict):
                        yield value


def not_json(path: Path, count: int) -> str:
    lines = f"1 line of {path.name} is" if count == 1 else f"{count} lines of {path.name} are"
    return f"{lines} not valid JSON (truncated?) and skipped"


def lineage(raw: Iterator[dict[str, Any]]) -> list[Row]:
    """Returns one row per step, ascending.

    A row of an earlier step than its predecessor means that the run was resumed there; the later rows
    are dropped. Two rows of one step (its update and its evaluation) are merged.
    """
    rows: list[Row] = []
    for line in raw:
        enter_row(rows, line)
    return rows


def enter_row(rows: list[Row], line: Mapping[str, Any]) -> None:
    """Adds a line of metrics to the rows; ignores a line without a step."""
    row = {key: value for key, value in ((key, known(line[key])) for key in line) if value is not None}
    if "step" not in row:
        return
    if rows and row["step"] < rows[-1]["step"]:
        while rows and rows[-1]["step"] >= row["step"]:
            rows.pop()
    if rows and rows[-1]["step"] == row["step"]:
        rows[-1].update(row)
    else:
        rows.append(row)


def eval_results(run_dir: Path) -> list[dict[str, Any]]:
    """Returns a row for each held-out set of each `tidegate eval`, the newest first, of complete files only.
    All texts are safe to print."""
    files = [(path.stat().st_mtime, path) for path in run_dir.glob("evals/*/results.json")]
    return [row for _, path in sorted(files, reverse=True) for row in _result_rows(path)]


def _result_rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        results = as_mapping(json.loads(path.read_text(encoding="utf-8", errors="replace")))
    except (OSError, ValueError, RecursionError):
        return
    sampling = as_mapping(results.get("sampling"))
    for name, summary in as_mapping(results.get("sets")).items():
        numbers = as_mapping(summary)
        yield {
            "directory": printable(f"evals/{path.parent.name}"),
            "target": printable(Path(str(results.get("target") or "")).name),
            "agent": printable(as_mapping(results.get("agent")).get("use") or ""),
            "status": printable(results.get("status") or ""),
            "set": printable(name),
            "temperature": known(sampling.get("temperature")),
            "samples": known(results.get("samples")),
            "tasks": known(numbers.get("tasks")),
            "failed": known(numbers.get("failed")),
            "reward": _interval(numbers.get("reward")),
            "method": printable(as_mapping(numbers.get("reward")).get("method") or ""),
            "pass": {printable(k): _interval(value) for k, value in as_mapping(numbers.get("pass")).items()},
        }


def _interval(found: object) -> list[float | None]:
    numbers = as_mapping(found)
    return [known(numbers.get(name)) for name in ("mean", "low", "high")]

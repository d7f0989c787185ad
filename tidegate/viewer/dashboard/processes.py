"""The processes of a run: CPU and memory over time, from `load.jsonl`, and the ends of their logs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from fastapi import Query

from tidegate.viewer.chart import Chart, Form, Point, Series, Tone, lines
from tidegate.viewer.dashboard.records import NotFound
from tidegate.viewer.dashboard.run import FollowedRun
from tidegate.viewer.dashboard.tail import json_object, whole_lines
from tidegate.viewer.formatting import as_mapping, known, printable

FILES = ("load.1.jsonl", "load.jsonl")
GB = 1e9
PAUSE_S = 60.0
"""Without a line for so long, the run did not run: the time is left out of the charts."""

STYLES: tuple[tuple[Tone, Form], ...] = (
    ("accent", "line"), ("sand", "line"), ("ink", "line"), ("warn", "line"), ("muted", "line"),
    ("accent", "dash"), ("sand", "dash"), ("ink", "dash"), ("warn", "dash"), ("muted", "dash"),
)  # fmt: skip
"""Of the processes with the most CPU time."""


@dataclass(slots=True)
class ProcessLoad:
    """Samples of a process by minutes since the first sample."""

    cpu: list[Point] = field(default_factory=list)
    memory: list[Point] = field(default_factory=list)
    processes: int = 0

    def to_wire(self, *, runs: bool) -> dict[str, Any]:
        """Returns means and peaks; the newest values are None if the process no longer runs."""
        cores = [value for _, value in self.cpu]
        return {
            "cpu": self.cpu[-1][1] if runs else None, "cpu_mean": sum(cores) / len(cores),
            "cpu_peak": max(cores), "memory": self.memory[-1][1] if runs else None,
            "memory_peak": max(value for _, value in self.memory), "processes": self.processes if runs else 0,
        }  # fmt: skip


def processes(run: FollowedRun) -> dict[str, Any]:
    """Returns the processes that the run recorded, or that have a log, and charts of their load."""
    logs = {file.name: file.size for file in log_files(run.dir)}
    sizes = [path.stat().st_size for name in FILES if (path := run.dir / name).exists()]
    wire: dict[str, Any] = run.kept("load", (sizes, logs), lambda: _collect(run.dir, logs))
    return wire


def _collect(run_dir: Path, logs: Mapping[str, int]) -> dict[str, Any]:
    found: dict[str, ProcessLoad] = {}
    newest: Mapping[str, Any] = {}
    for minutes, newest in _samples(run_dir):
        for name, values in newest.items():
            one, numbers = found.setdefault(printable(name), ProcessLoad()), as_mapping(values)
            one.cpu.append((minutes, known(numbers.get("cpu")) or 0.0))
            one.memory.append((minutes, (known(numbers.get("memory")) or 0.0) / GB))
            one.processes = int(known(numbers.get("processes")) or 0)
    running = set(map(printable, newest))
    named = sorted(found, key=lambda name: -sum(value for _, value in found[name].cpu))
    rows = [
        {
            "name": name,
            "log": logs.get(name),
            **(found[name].to_wire(runs=name in running) if name in found else {}),
        }
        for name in (*named, *sorted(logs.keys() - found.keys()))
    ]
    return {"processes": rows, "charts": _charts({name: found[name] for name in named})}


def _samples(run_dir: Path) -> Iterator[tuple[float, Mapping[str, Any]]]:
    """Yields each line's minutes since the first one, and its processes."""
    before, minutes = None, 0.0
    for name in FILES:
        try:
            file = (run_dir / name).open("rb")
        except FileNotFoundError:
            continue
        with file:
            for _, line in whole_lines(file, 0):
                sample = json_object(line) or {}
                time = known(sample.get("time"))
                if time is None:
                    continue
                if before is not None and 0 < time - before < PAUSE_S:
                    minutes += (time - before) / 60
                before = time
                yield round(minutes, 3), as_mapping(sample.get("processes"))


def _charts(found: Mapping[str, ProcessLoad]) -> list[Chart]:
    styled = list(zip(found.items(), STYLES, strict=False))
    cpu = [Series(name, one.cpu, tone, form) for (name, one), (tone, form) in styled]
    memory = [Series(name, one.memory, tone, form) for (name, one), (tone, form) in styled]
    axis = "minutes of running"
    charts = (
        lines("CPU", cpu, note="CPU time per second, with all child processes.", axes=(axis, "cores in use"),
              y_range=(0.0, None)),
        lines("Memory", memory, note="Resident memory; pages that processes share count in each.",
              axes=(axis, "GB"), y_range=(0.0, None)),
    )  # fmt: skip
    return [chart for chart in charts if chart is not None]


MOST_BYTES = 64_000

Bytes = Annotated[int, Query(ge=1, le=2_000_000)]
Name = Annotated[str, Query(max_length=200)]


@dataclass(frozen=True, slots=True)
class LogFile:
    name: str
    path: Path
    size: int


def log_files(run_dir: Path) -> list[LogFile]:
    """Returns the files `logs/*.log` of a run, by name; links are left out."""
    paths = sorted((run_dir / "logs").glob("*.log"))
    return [
        LogFile(printable(path.stem), path, path.stat().st_size)
        for path in paths
        if path.is_file() and not path.is_symlink()
    ]


def log_tail(run: FollowedRun, name: Name, most: Bytes = MOST_BYTES) -> dict[str, Any]:
    """Returns the last lines of a log, of at most `most` bytes; raises NotFound if there is no such log.

    The name is compared with those of the directory: no path is made of it.
    """
    found = next((file for file in log_files(run.dir) if file.name == name), None)
    if found is None:
        raise NotFound(f"the run has no log {name!r}; see the page Processes for those that it has")
    with found.path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - most))
        data = file.read(most)
    if size > len(data):
        data = data.partition(b"\n")[2] or data
    return {
        "name": found.name, "path": printable(found.path), "size": size, "shown": len(data),
        "text": printable(data.decode(errors="replace")),
    }  # fmt: skip

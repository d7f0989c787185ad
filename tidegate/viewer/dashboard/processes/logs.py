"""The logs of a run's processes: which there are, and the end of each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from fastapi import Query

from tidegate.viewer.dashboard.records import NotFound
from tidegate.viewer.dashboard.run import FollowedRun
from tidegate.viewer.formatting import printable

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

"""A run whose files the dashboard follows while they grow; it serves concurrent requests."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidegate.viewer.dashboard.downsample import Downsampled
from tidegate.viewer.dashboard.ledger_groups import GroupEntry, LedgerGroups
from tidegate.viewer.dashboard.records import EpisodeSummary, Records
from tidegate.viewer.dashboard.tail import Tail
from tidegate.viewer.dashboard.tokens import Texts
from tidegate.viewer.ledger_counts import LedgerCounter, LedgerCounts, committed
from tidegate.viewer.run_files import RunFiles, enter_row, read_settings, run_directory

FRESH_S = 0.3
"""Requests within so many seconds of each other look at the files once."""
QUIET_S = 60.0
"""A run that has written nothing for so long, and did not say that it ended, is called quiet."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """Changes whenever something was written. `metrics` and `ledger` are bytes read so far."""

    metrics: int
    ledger: int
    restarts: int
    committed: int
    failed: int

    def __str__(self) -> str:
        return f"{self.metrics}-{self.ledger}-{self.restarts}-{self.committed}-{self.failed}"


class FollowedRun:
    """The files of one run.

    Raises ConfigError where the directory is not there or holds no run.
    """

    def __init__(self, run_dir: Path) -> None:
        run_directory(run_dir)
        self.dir = run_dir
        self.files = RunFiles(run_dir)
        self.texts = Texts(run_dir, None)
        self._config: tuple[int, int] | None = None
        self.records = Records(run_dir)
        self.book = LedgerGroups()
        self._coarse = Downsampled()
        self._keeper = LedgerCounter()
        self._metrics = Tail(run_dir / "metrics.jsonl")
        self._ledger = Tail(run_dir / "ledger.jsonl")
        self._restarts = 0
        self._committed = 0
        self._looked = 0.0
        self.lock = threading.RLock()
        self._made: dict[str, tuple[Stamp, Any]] = {}
        self._read_settings()

    def _read_settings(self) -> None:
        """Again where they changed: a directory may come to hold another run."""
        config = self.dir / "config.toml"
        seen = (found.st_ino, found.st_mtime_ns) if (found := _stat(config)) is not None else None
        if seen == self._config:
            return
        self._config = seen
        self.files.remarks = []
        self.files.settings = read_settings(self.dir, self.files.remarks)
        model = self.files.settings.get("model", {})
        self.texts = Texts(self.dir, str(model.get("path") or "") if isinstance(model, dict) else None)

    def look(self) -> Stamp:
        """Read what was written since the last time."""
        with self.lock:
            if time.monotonic() - self._looked > FRESH_S:
                self._read_settings()
                self._read_metrics()
                self._read_ledger()
                self._committed = committed(self.dir)
                self._looked = time.monotonic()
            return self._stamp()

    def _stamp(self) -> Stamp:
        failed = _stat(self.dir / "trajectories" / "failed.jsonl")
        size = 0 if failed is None else failed.st_size
        return Stamp(self._metrics.offset, self._ledger.offset, self._restarts, self._committed, size)

    def _read_metrics(self) -> None:
        if self._metrics.restarted():
            self._restarts += 1
            self.files.rows, self.files.redone = [], []
        for line in self._metrics.objects():
            enter_row(self.files.rows, self.files.redone, line)

    def _read_ledger(self) -> None:
        if self._ledger.restarted():
            self._restarts += 1
            self.book, self._keeper = LedgerGroups(), LedgerCounter()
        for entry in self._ledger.objects():
            self.book.enter(entry)
            self._keeper.enter(entry)

    def made(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` makes of the run as it stands, kept until something new was written."""
        with self.lock:
            stamp = self.look()
            found = self._made.get(name)
            if found is None or found[0] != stamp:
                found = (stamp, make())
                self._made[name] = found
            return found[1]

    def books(self) -> LedgerCounts | None:
        """None where there is no ledger yet."""
        if not self._ledger.offset:
            return None
        books: LedgerCounts = self.made("books", lambda: self._keeper.books(self._committed))
        return books

    def curves(self) -> RunFiles:
        """The run as its charts need it: for a very long one, fewer rows."""
        return self._coarse.of(self.files)

    def remarks(self) -> list[str]:
        """What could not be read."""
        found = list(self.files.remarks)
        for tail in (self._metrics, self._ledger):
            if tail.broken:
                lines = "a line that is" if tail.broken == 1 else f"{tail.broken} lines that are"
                found.append(f"{tail.path.name} has {lines} not JSON and left out")
        return found

    def state_of(self, one: EpisodeSummary) -> str:
        """What became of an episode, by the ledger where it knows, else as its record says."""
        if one.state is None:
            return "eval"
        if one.state == "stepped" and one.group:
            with self.lock:
                if self._keeper.is_abandoned(one.group):
                    return "abandoned"
                return self._keeper.group_state(one.group, self._committed) or one.state
        return one.state

    def group_entry(self, group_id: str) -> GroupEntry | None:
        with self.lock:
            return self.book.groups.get(group_id)

    def silence(self) -> float | None:
        """Seconds since the run last wrote its metrics or its ledger; None where it has neither."""
        found = (_stat(self._metrics.path), _stat(self._ledger.path))
        times = [one.st_mtime for one in found if one is not None]
        return max(0.0, time.time() - max(times)) if times else None

    def status(self) -> str:
        """`ended`, `running`, or `quiet`: it neither wrote lately nor said that it ended."""
        if self.book.ended is not None:
            return "ended"
        silence = self.silence()
        return "quiet" if silence is None or silence > QUIET_S else "running"


def _stat(path: Path) -> os.stat_result | None:
    """None where there is no such file; it may come or go at any moment."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def list_runs(parent: Path) -> list[Path]:
    """The directories of runs in a directory, the one that was written to last first."""
    found = (
        [path for path in parent.iterdir() if (path / "metrics.jsonl").exists()] if parent.is_dir() else []
    )
    return sorted(found, key=lambda path: -(path / "metrics.jsonl").stat().st_mtime)

"""Reads a run's files as they grow, for concurrent requests."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Annotated, Any

from fastapi import Query

from tidegate.service.directory_lock import in_use
from tidegate.trainer.ledger.jsonl import parts
from tidegate.trainer.ledger.state import LedgerState
from tidegate.viewer.clients.records import ClientRecords
from tidegate.viewer.dashboard.records import EpisodeSummary, Records
from tidegate.viewer.dashboard.tail import Tail
from tidegate.viewer.dashboard.tokens import Texts
from tidegate.viewer.ledger import LedgerCounts, apply_entries, committed, count
from tidegate.viewer.run_files import RunFiles, enter_row, not_json, read_settings, run_directory
from tidegate.viewer.signs.watch import SignWatch

Number = Annotated[int, Query(ge=0, lt=2**53)]
"""A step, a line or another number in a request."""
ENDS = ("completed", "interrupted", "failed")
FRESH_S = 0.3
"""Minimum time between two reads of the files."""
QUIET_S = 60.0
"""A run whose ledger has no end, and that wrote nothing for this time, has the status quiet or stopped."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """Changes whenever a file has changed. `metrics`, `ledger` and `clients` are the bytes read so far."""

    metrics: int
    ledger: int
    restarts: int
    committed: int
    failed: int
    clients: int
    tested: int

    def __str__(self) -> str:
        return "-".join(map(str, astuple(self)))


class FollowedRun:
    """The files of one run, which may be about to start.

    Raises ConfigError if the directory does not exist, or is neither a run nor locked by one that starts.
    """

    def __init__(self, run_dir: Path) -> None:
        if not (run_dir.is_dir() and in_use(run_dir)):
            run_directory(run_dir)
        self.dir = run_dir
        self.files = RunFiles(run_dir)
        self.texts = Texts(run_dir, None)
        self._config: tuple[int, int] | None = None
        self.records = Records(run_dir)
        self.ledger = LedgerState()
        self.clients = ClientRecords()
        self.signs = SignWatch()
        self._metrics_tail = Tail(run_dir / "metrics.jsonl")
        self._ledger_tail = Tail(run_dir / "ledger.jsonl")
        self._clients_tail = Tail(run_dir / "clients.jsonl")
        self._restarts = 0
        self.committed = 0
        self._looked = 0.0
        self.lock = threading.RLock()
        self._cache: dict[str, tuple[object, Any]] = {}
        self._read_settings()

    def _read_settings(self) -> None:
        """Reads the settings if the file changed: the directory may now belong to another run."""
        config = self.dir / "config.toml"
        seen = (stat.st_ino, stat.st_mtime_ns) if (stat := _stat(config)) is not None else None
        if seen == self._config:
            return
        self._config = seen
        self.files.remarks = []
        self.files.settings = read_settings(self.dir, self.files.remarks)
        model = self.files.settings.get("model", {})
        self.texts = Texts(self.dir, str(model.get("path") or "") if isinstance(model, dict) else None)

    def refresh(self) -> Stamp:
        """Reads what was written since the last call."""
        with self.lock:
            if time.monotonic() - self._looked > FRESH_S:
                self._read_settings()
                self._read_metrics()
                self._read_ledger()
                self._read_clients()
                self.committed = committed(self.dir)
                self._looked = time.monotonic()
            return self._stamp()

    def _stamp(self) -> Stamp:
        failed = map(_stat, parts(self.dir / "trajectories" / "failed.jsonl"))
        test = _stat(self.dir / "canary.json")
        return Stamp(
            self._metrics_tail.offset, self._ledger_tail.offset, self._restarts, self.committed,
            sum(stat.st_size for stat in failed if stat is not None), self._clients_tail.offset,
            0 if test is None else test.st_mtime_ns,
        )  # fmt: skip

    def _read_metrics(self) -> None:
        if self._metrics_tail.restarted():
            self._restarts += 1
            self.files.rows = []
            self.signs = SignWatch()
        for line in self._metrics_tail.objects():
            enter_row(self.files.rows, line)
            self.signs.step(line)

    def _read_ledger(self) -> None:
        if self._ledger_tail.restarted():
            self._restarts += 1
            self.ledger = LedgerState()
        apply_entries(self.ledger, self._ledger_tail.objects())

    def _read_clients(self) -> None:
        if self._clients_tail.restarted():
            self._restarts += 1
            self.clients = ClientRecords()
        self.clients.read(self._clients_tail.objects())

    def cached(self, name: str, make: Callable[[], Any]) -> Any:
        """Returns the result of `make`, cached under `name` until a file changes."""
        with self.lock:
            return self.kept(name, self.refresh(), make)

    def kept(self, name: str, key: object, make: Callable[[], Any]) -> Any:
        """Returns the result of `make`, cached under `name` while `key` is equal."""
        with self.lock:
            entry = self._cache.get(name)
            if entry is None or entry[0] != key:
                entry = self._cache[name] = (key, make())
            return entry[1]

    def counts(self) -> LedgerCounts | None:
        """Returns the ledger's counts; None if there is no ledger yet."""
        if not self._ledger_tail.offset:
            return None
        counts: LedgerCounts = self.cached("counts", lambda: count(self.ledger, self.committed))
        return counts

    def starts(self) -> list[float]:
        """Returns the Unix times of the run's start and of each resumption, as far as its ledger has them."""
        counts = self.counts()
        return [] if counts is None else counts.starts

    def remarks(self) -> list[str]:
        """Returns remarks on unreadable content."""
        remarks = list(self.files.remarks)
        for tail in (self._metrics_tail, self._ledger_tail, self._clients_tail):
            if tail.broken:
                remarks.append(not_json(tail.path, tail.broken))
        return remarks

    def state_of(self, episode: EpisodeSummary) -> str:
        """Returns an episode's state, by the ledger if it has the group, else by the record."""
        if episode.state is None:
            return "eval"
        group = self.ledger.groups.get(episode.group)
        if episode.state == "stepped" and group is not None:
            return "abandoned" if group.discarded else group.final(self.committed).value
        return episode.state

    def silence(self) -> float | None:
        """Returns the seconds since the last write to metrics or ledger; None if neither exists."""
        stats = (_stat(self._metrics_tail.path), _stat(self._ledger_tail.part))
        times = [stat.st_mtime for stat in stats if stat is not None]
        return max(0.0, time.time() - max(times)) if times else None

    def status(self) -> str:
        """Returns how the run ended, or its status without a recorded end.

        Returns:
            `completed`, `interrupted`, `failed`, or `ended` by a ledger that does not tell which; `running`;
            `starting`: a process has locked its directory, and nothing is recorded yet;
            `quiet`: its trainer works, or may do so, and has recorded nothing lately; `stopped`: its
            trainer recorded its load, and does so no more.
        """
        if self.ledger.end is not None:
            status = self.ledger.end.get("status")
            return status if status in ENDS else "ended"
        if self._is_tuned():
            return "completed"
        silence = self.silence()
        if silence is None and in_use(self.dir):
            return "starting"
        if silence is not None and silence <= QUIET_S:
            return "running"
        load = _stat(self.dir / "load.jsonl")
        return "stopped" if load is not None and time.time() - load.st_mtime > QUIET_S else "quiet"

    def _is_tuned(self) -> bool:
        """Whether it is a fine-tuning, which has no ledger, with all its steps taken."""
        files = self.files
        return files.is_fine_tuning and files.rows[-1]["step"] >= files.rows[-1]["sft/steps"]


def _stat(path: Path) -> os.stat_result | None:
    """Returns None if there is no such file; files may appear or vanish at any time."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def list_runs(parent: Path) -> list[Path]:
    """Returns the run directories in `parent`, the most recently written first."""
    runs = [path for path in parent.iterdir() if (path / "metrics.jsonl").exists()] if parent.is_dir() else []
    return sorted(runs, key=lambda path: -(path / "metrics.jsonl").stat().st_mtime)

"""Reads a run's files as they grow, for concurrent requests."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from fastapi import Query

from tidegate.service.directory_lock import in_use
from tidegate.trainer.ledger.jsonl import parts
from tidegate.trainer.ledger.state import LedgerState
from tidegate.viewer.clients.history import VersionHistory
from tidegate.viewer.clients.records import ClientRecords
from tidegate.viewer.clients.service import ServiceData, read_test
from tidegate.viewer.dashboard.records import EpisodeSummary, Records
from tidegate.viewer.dashboard.tail import Tail
from tidegate.viewer.dashboard.tokens import Texts
from tidegate.viewer.ledger import LedgerCounts, apply_entries, committed, count
from tidegate.viewer.run_files import Row, RunFiles, enter_row, not_json, read_settings, run_directory
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
        self.history = VersionHistory()
        self.signs = SignWatch()
        self._coarse = Downsampled()
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
            self.files.rows, self.files.redone = [], []
            self.signs = SignWatch()
        for line in self._metrics_tail.objects():
            enter_row(self.files.rows, self.files.redone, line)
            self.signs.step(line)

    def _read_ledger(self) -> None:
        if self._ledger_tail.restarted():
            self._restarts += 1
            self.ledger, self.history = LedgerState(), VersionHistory()
        apply_entries(self.ledger, self.history.read(self._ledger_tail.objects()))

    def _read_clients(self) -> None:
        if self._clients_tail.restarted():
            self._restarts += 1
            self.clients = ClientRecords()
        self.clients.read(self._clients_tail.objects())

    def service(self) -> ServiceData:
        """Returns the records of clients so far."""
        test = read_test(self.dir)
        return ServiceData(self.files, self.ledger, self.committed, self.clients, self.history, test)

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

    def curves(self) -> RunFiles:
        """Returns the run for its charts, with fewer rows if it is very long."""
        return self._coarse.of(self.files)

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


MOST_ROWS = 3000
"""Ten times what a chart shows."""

LAST = ("step", "time", "version", "episodes", "tokens/sampled_total")
"""Counted since the start of the run, like `groups/…` and `attempts/…`: their newest value stands."""


class Downsampled:
    """Rows in runs of equal length, each made one; what was made of whole runs is kept while a run grows."""

    def __init__(self) -> None:
        self._size = 1
        self._sealed: list[Row] = []
        self._ends: Row | None = None
        """The last row of the last sealed run: where it is another one, the run went back."""

    def of(self, files: RunFiles) -> RunFiles:
        """The same run with at most about MOST_ROWS rows; the very first row always stands by itself."""
        if len(files.rows) <= MOST_ROWS:
            return files
        first, rows = files.rows[0], files.rows[1:]
        size = 1
        while len(rows) > size * MOST_ROWS:
            size *= 2
        done = len(self._sealed) * self._size
        if size != self._size or done > len(rows) or (done and rows[done - 1] is not self._ends):
            self._size, self._sealed, done = size, [], 0
        # The newest row may still be added to, as an evaluation's scores are: its run is not sealed.
        while done + size < len(rows):
            self._sealed.append(one_of(rows[done : done + size]))
            done += size
            self._ends = rows[done - 1]
        return replace(files, rows=[first, *self._sealed, one_of(rows[done:])])


def one_of(rows: Sequence[Row]) -> Row:
    """The mean of each metric over the rows that have it; the newest value of what is counted from the start
    and of scores, the largest of what is a maximum."""
    found: Row = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        values = [row[key] for row in rows if key in row]
        if key in LAST or key.startswith(("groups/", "attempts/", "eval/")):
            found[key] = values[-1]
        elif key.endswith("/max"):
            found[key] = max(values)
        else:
            found[key] = sum(values) / len(values)
    return found

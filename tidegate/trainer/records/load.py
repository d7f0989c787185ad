"""CPU time and memory of a run's processes on this machine: `load.jsonl`, a line every few seconds."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

FILE, OLDER = "load.jsonl", "load.1.jsonl"
EVERY_S = 5.0
MOST_BYTES = 4_000_000
"""Size at which the file becomes `load.1.jsonl`, in place of the one before: about a day."""
TRAINER = "trainer"


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """State of a process; `cpu_s` is the CPU time of all its threads, `memory` its resident bytes."""

    pid: int
    parent: int
    cpu_s: float
    memory: int


class LoadLog:
    """Samples this process and all below it, and appends the sums by process of the run.

    A process that the trainer started counts under the name of its log (`logs/engine.log`: `engine`), with
    all that it has started itself, such as sandboxes. The rest counts as `trainer`.

    Args:
        run_dir: The run's directory.
        proc: Mount point of procfs; without one, nothing is recorded.
    """

    def __init__(self, run_dir: Path, proc: Path = Path("/proc")) -> None:
        self.path = run_dir / FILE
        self._logs = (run_dir / "logs").resolve()
        self._root = os.getpid()
        self._proc = proc
        self._before: dict[int, float] = {}
        self._at = 0.0

    async def watch(self, every_s: float = EVERY_S) -> None:
        """Append a line every `every_s` seconds; returns without procfs, or if a line cannot be written."""
        while (self._proc / "self" / "stat").exists():
            try:
                await asyncio.to_thread(self.sample)
            except OSError as error:
                log.warning("the load of processes is no longer recorded in %s: %s", self.path, error)
                return
            await asyncio.sleep(every_s)

    def sample(self) -> None:
        """Append a line; the first call starts to measure and writes none."""
        now = time.monotonic()
        stats = {stat.pid: stat for stat in self._stats()}
        names = self._names(stats)
        if self._at:
            self._append(self._sums(stats, names, now - self._at))
        self._before = {pid: stats[pid].cpu_s for pid in names}
        self._at = now

    def _stats(self) -> Iterator[ProcessStat]:
        tick, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
        for folder in self._proc.iterdir():
            if folder.name.isdigit():
                try:
                    text = (folder / "stat").read_text(errors="replace")
                except OSError:
                    continue  # it has exited
                fields = text.rpartition(")")[2].split()  # the name before may contain spaces
                cpu = (int(fields[11]) + int(fields[12])) / tick
                yield ProcessStat(int(folder.name), int(fields[1]), cpu, int(fields[21]) * page)

    def _names(self, stats: dict[int, ProcessStat]) -> dict[int, str]:
        """Returns the name under which each process below the root counts."""
        children = defaultdict(list)
        for stat in stats.values():
            children[stat.parent].append(stat.pid)
        names = {self._root: TRAINER} if self._root in stats else {}
        waiting = list(names)
        while waiting:
            parent = waiting.pop()
            for pid in children[parent]:
                inherited = names[parent]
                names[pid] = (self._log_of(pid) or inherited) if inherited == TRAINER else inherited
                waiting.append(pid)
        return names

    def _log_of(self, pid: int) -> str | None:
        """Returns the name of the log of the run to which a process writes its errors."""
        try:
            target = Path(os.readlink(self._proc / str(pid) / "fd" / "2"))
        except OSError:
            return None
        return target.stem if target.parent == self._logs else None

    def _sums(self, stats: dict[int, ProcessStat], names: dict[int, str], seconds: float) -> dict[str, Any]:
        sums: dict[str, dict[str, float]] = {}
        for pid, name in names.items():
            one = sums.setdefault(name, {"cpu": 0.0, "memory": 0, "processes": 0})
            used = stats[pid].cpu_s - self._before.get(pid, 0.0)
            # A new process may have the id of one that exited, with less CPU time.
            one["cpu"] = round(one["cpu"] + max(0.0, used) / seconds, 3)
            one["memory"] += stats[pid].memory
            one["processes"] += 1
        return sums

    def _append(self, sums: dict[str, Any]) -> None:
        if self.path.exists() and self.path.stat().st_size > MOST_BYTES:
            self.path.replace(self.path.with_name(OLDER))
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": round(time.time(), 3), "processes": sums}) + "\n")

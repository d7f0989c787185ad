"""Indexes `trajectories/*.jsonl`: the byte offset and a summary of each line."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tidegate.viewer.dashboard.errors import NotFound
from tidegate.viewer.dashboard.tail import goes_on, json_object, whole_lines
from tidegate.viewer.formatting import known, printable

Kind = Literal["step", "eval", "failed"]

MOST_SUMMARIES = 400_000
"""Of all files together; the file that was not looked at for longest is forgotten first."""
MOST_RECORDS = 32
LONGEST_ERROR = 400


@dataclass(slots=True)
class EpisodeSummary:
    """One record, as a list shows it; `line` is its place in the file, from 0."""

    line: int
    offset: int
    length: int
    group: str
    slot: int | None
    task: str
    state: str | None
    outcome: str
    reward: float | None
    advantage: float | None
    turns: int
    tokens: int
    undelivered: int
    oldest: int | None
    newest: int | None
    eval_set: str
    mode: str
    seconds: float | None
    attempt: str
    error: str

    def to_wire(self) -> dict[str, Any]:
        hidden = ("offset", "length")
        return {name: getattr(self, name) for name in self.__slots__ if name not in hidden}


def summary(line: int, offset: int, length: int, record: Mapping[str, Any]) -> EpisodeSummary:
    """The words on one record; missing fields are left out, never an error."""
    turns = [one for one in _list(record.get("turns")) if isinstance(one, Mapping)]
    versions = [int(span[0]) for turn in turns for span in spans_of(turn)]
    metadata = record.get("metadata")
    attempt = record.get("attempt") or (metadata.get("attempt") if isinstance(metadata, Mapping) else None)
    slot = record.get("slot")
    return EpisodeSummary(
        line=line,
        offset=offset,
        length=length,
        group=printable(record.get("group_id") or ""),
        slot=slot if isinstance(slot, int) else None,
        task=printable(record.get("task_id") or ""),
        state=printable(record["state"]) if record.get("state") else None,
        outcome=printable(record.get("outcome") or ""),
        reward=known(record.get("reward")),
        advantage=known(record.get("advantage")),
        turns=len(turns),
        tokens=sum(len(_list(turn.get("output_ids"))) for turn in turns),
        undelivered=sum(not turn.get("delivered", True) for turn in turns),
        oldest=min(versions, default=None),
        newest=max(versions, default=None),
        eval_set=printable(record.get("eval_set") or ""),
        mode=printable(record.get("mode") or ""),
        seconds=known(record.get("seconds")),
        attempt=printable(attempt or ""),
        error=printable(record.get("error") or "")[:LONGEST_ERROR],
    )


def spans_of(turn: Mapping[str, Any]) -> list[tuple[int, int, int]]:
    """The version spans of a turn as (version, start, end); those that are none are left out."""
    found = [one for one in _list(turn.get("version_spans")) if isinstance(one, list) and len(one) == 3]
    return [(one[0], one[1], one[2]) for one in found if all(type(part) is int for part in one)]


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


@dataclass(slots=True)
class RecordFile:
    """One file's index, brought up to date by `refresh`. A file that only grew is read on, not again."""

    path: Path
    name: str
    summaries: list[EpisodeSummary] = field(default_factory=list)
    groups: dict[str, list[EpisodeSummary]] = field(default_factory=dict)
    seen: tuple[int, int, int] = (0, 0, 0)
    """What tells one state of the file from another."""
    _end: int = 0
    _last: bytes = b""

    def refresh(self) -> None:
        """Raises NotThere where there is no such file."""
        try:
            file = open(self.path, "rb")  # noqa: SIM115 - closed by the with below
        except FileNotFoundError:
            raise NotFound(f"the run has no {self.name}: {self.path.name} was not written") from None
        with file:
            found = os.fstat(file.fileno())
            seen = (found.st_ino, found.st_mtime_ns, found.st_size)
            if seen == self.seen:
                return
            if not goes_on(file, self._end, self._last):
                self.summaries, self.groups, self._end = [], {}, 0
            for offset, line in whole_lines(file, self._end):
                self._end, self._last = offset + len(line), line
                record = json_object(line)
                if record is not None:
                    self._add(summary(len(self.summaries), offset, len(line), record))
            self.seen = seen

    def _add(self, one: EpisodeSummary) -> None:
        self.summaries.append(one)
        if one.group:
            self.groups.setdefault(one.group, []).append(one)

    def read(self, line: int) -> dict[str, Any]:
        """One whole record. Raises NotThere for a line that the file does not hold."""
        if not 0 <= line < len(self.summaries):
            raise NotFound(f"{self.name} has {len(self.summaries)} episodes; there is none at place {line}")
        one = self.summaries[line]
        with open(self.path, "rb") as file:
            found = os.fstat(file.fileno())
            file.seek(one.offset)
            record = json_object(file.read(one.length))
        if found.st_ino != self.seen[0] or record is None:
            raise NotFound(f"{self.name} is being written again; ask once more")
        return record

    def group(self, group_id: str) -> list[EpisodeSummary]:
        """The members of a group in slot order. Raises NotThere."""
        found = self.groups.get(group_id)
        if not found:
            raise NotFound(f"{self.name} holds no group {group_id!r}")
        return sorted(found, key=lambda one: (one.slot is None, one.slot or 0, one.line))


class Records:
    """The files of a run's trajectories, with bounded memory. Safe to use from several threads."""

    def __init__(self, run_dir: Path) -> None:
        self._directory = run_dir / "trajectories"
        self._files: OrderedDict[str, RecordFile] = OrderedDict()
        self._read: OrderedDict[tuple[str, int, tuple[int, int, int]], dict[str, Any]] = OrderedDict()
        self._lock = threading.Lock()

    def file(self, kind: Kind, number: int) -> RecordFile:
        """An up-to-date index. Raises NotThere."""
        with self._lock:
            return self._file(kind, number)

    def read(self, kind: Kind, number: int, line: int) -> tuple[EpisodeSummary, dict[str, Any]]:
        """One record and the words on it. Raises NotThere."""
        with self._lock:
            file = self._file(kind, number)
            key = (file.path.name, line, file.seen)
            if key not in self._read:
                self._read[key] = file.read(line)
            self._read.move_to_end(key)
            while len(self._read) > MOST_RECORDS:
                self._read.popitem(last=False)
            return file.summaries[line], self._read[key]

    def numbers(self, kind: Kind) -> list[int]:
        """The steps for which there is a file, in order."""
        found = (path.stem.removeprefix(f"{kind}_") for path in self._directory.glob(f"{kind}_*.jsonl"))
        return sorted(int(one) for one in found if one.isdigit())

    def _file(self, kind: Kind, number: int) -> RecordFile:
        name = "failed.jsonl" if kind == "failed" else f"{kind}_{number:06d}.jsonl"
        said = {"failed": "failed episodes", "eval": f"evaluation at step {number}"}
        file = self._files.get(name) or RecordFile(self._directory / name, said.get(kind, f"step {number}"))
        file.refresh()
        self._files[name] = file
        self._files.move_to_end(name)
        while len(self._files) > 1 and self._held() > MOST_SUMMARIES:
            self._files.popitem(last=False)
        return file

    def _held(self) -> int:
        return sum(len(file.summaries) for file in self._files.values())

"""Indexes `trajectories/*.jsonl`: the byte offset and a summary of each line."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Literal

from tidegate.errors import TidegateError
from tidegate.trainer.ledger.jsonl import nth_part, parts
from tidegate.viewer.dashboard.tail import goes_on, json_object, whole_lines
from tidegate.viewer.formatting import as_list, as_mapping, known, mappings, printable

Kind = Literal["step", "eval", "failed", "stale"]
"""`failed` and `stale`: episodes that failed, or became stale, before the trainer fetched their group."""

IN_PARTS = {"failed": "failed episodes", "stale": "stale episodes"}
"""Kinds with one file for the whole run, and its name in messages. A number of such a file is a part's."""
PART_LINES = 1_000_000_000
"""Lines that are counted for each part of such a file: line numbers do not depend on earlier parts."""
MOST_SUMMARIES = 400_000
"""Maximum over all files; the least recently used file is dropped first."""
MOST_RECORDS = 32
LONGEST_ERROR = 400
LONGEST_PROMPT = 160
"""Characters of the prompt that lists show."""


class NotFound(TidegateError):
    """A step, group, episode or turn that the run's files do not hold; the message names it."""


@dataclass(slots=True)
class EpisodeSummary:
    """One record as shown in lists; `line` is its index in the file plus `RecordFile.first`."""

    line: int
    offset: int
    length: int
    group: str
    slot: int | None
    task: str
    state: str | None
    outcome: str
    _: KW_ONLY
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
    prompt: str
    """Beginning of the first message of the user, on one line."""
    prompt_cut: bool
    started: float | None
    """Unix time of its first call."""

    def to_wire(self) -> dict[str, Any]:
        hidden = ("offset", "length")
        return {name: getattr(self, name) for name in self.__slots__ if name not in hidden}


def summary(line: int, offset: int, length: int, record: Mapping[str, Any]) -> EpisodeSummary:
    """Summarises a record; missing fields are never an error."""
    turns = mappings(record.get("turns"))
    versions = [int(span[0]) for turn in turns for span in spans_of(turn)]
    attempt = record.get("attempt") or as_mapping(record.get("metadata")).get("attempt")
    slot = record.get("slot")
    prompt = prompt_of(record)
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
        tokens=sum(len(as_list(turn.get("output_ids"))) for turn in turns),
        undelivered=sum(not turn.get("delivered", True) for turn in turns),
        oldest=min(versions, default=None),
        newest=max(versions, default=None),
        eval_set=printable(record.get("eval_set") or ""),
        mode=printable(record.get("mode") or ""),
        seconds=known(record.get("seconds")),
        attempt=printable(attempt or ""),
        error=printable(record.get("error") or "")[:LONGEST_ERROR],
        prompt=prompt[:LONGEST_PROMPT],
        prompt_cut=len(prompt) > LONGEST_PROMPT,
        started=min((start for turn in turns if (start := known(turn.get("started")))), default=None),
    )


def prompt_of(record: Mapping[str, Any]) -> str:
    """Returns the text of the first message of the user on one line; empty if there is none."""
    users = (one for one in mappings(record.get("messages")) if one.get("role") == "user")
    content = next(users, {}).get("content")
    if isinstance(content, list):
        content = " ".join(str(part.get("text") or "") for part in mappings(content))
    return printable(" ".join(str(content or "").split()))


def spans_of(turn: Mapping[str, Any]) -> list[tuple[int, int, int]]:
    """Returns the version spans of a turn as (version, start, end); skips invalid ones."""
    spans = [span for span in as_list(turn.get("version_spans")) if isinstance(span, list) and len(span) == 3]
    return [(span[0], span[1], span[2]) for span in spans if all(type(part) is int for part in span)]


def part_of(line: int) -> int:
    """Returns the number of the part with a line of failed or stale episodes."""
    return line // PART_LINES + 1


def in_slot_order(members: Sequence[EpisodeSummary]) -> list[EpisodeSummary]:
    return sorted(members, key=lambda member: (member.slot is None, member.slot or 0, member.line))


@dataclass(slots=True)
class RecordFile:
    """One file's index, updated by `refresh`, which reads only the new part of a file that has grown."""

    path: Path
    name: str
    first: int = 0
    """Number of the first line."""
    summaries: list[EpisodeSummary] = field(default_factory=list)
    groups: dict[str, list[EpisodeSummary]] = field(default_factory=dict)
    seen: tuple[int, int, int] = (0, 0, 0)
    """Inode, modification time (ns) and size at the last read."""
    _end: int = 0
    _last: bytes = b""

    def refresh(self) -> None:
        """Updates the index; raises NotFound if there is no such file."""
        try:
            file = open(self.path, "rb")  # noqa: SIM115 - closed by the with below
        except FileNotFoundError:
            raise NotFound(f"the run has no {self.name}: {self.path.name} does not exist") from None
        with file:
            stat = os.fstat(file.fileno())
            seen = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            if seen == self.seen:
                return
            if not goes_on(file, self._end, self._last):
                self.summaries, self.groups, self._end = [], {}, 0
            for offset, line in whole_lines(file, self._end):
                self._end, self._last = offset + len(line), line
                record = json_object(line)
                if record is not None:
                    self._add(summary(self.first + len(self.summaries), offset, len(line), record))
            self.seen = seen

    def _add(self, episode: EpisodeSummary) -> None:
        self.summaries.append(episode)
        if episode.group:
            self.groups.setdefault(episode.group, []).append(episode)

    def read(self, line: int) -> dict[str, Any]:
        """Returns a record; raises NotFound if the file has no such line."""
        episode = self.at(line)
        with open(self.path, "rb") as file:
            stat = os.fstat(file.fileno())
            file.seek(episode.offset)
            record = json_object(file.read(episode.length))
        if stat.st_ino != self.seen[0] or record is None:
            raise NotFound(f"{self.name} is being rewritten; try again")
        return record

    def at(self, line: int) -> EpisodeSummary:
        """Returns a record's summary; raises NotFound if the file has no such line."""
        if not 0 <= line - self.first < len(self.summaries):
            raise NotFound(f"{self.name} has {len(self.summaries)} episodes; there is no episode {line}")
        return self.summaries[line - self.first]

    def group(self, group_id: str) -> list[EpisodeSummary]:
        """Returns the episodes of a group in slot order; raises NotFound if there is no such group."""
        members = self.groups.get(group_id)
        if not members:
            raise NotFound(f"{self.name} has no group {group_id!r}")
        return in_slot_order(members)


def in_batch_order(file: RecordFile) -> list[str]:
    """Returns a file's groups: those of the batch, then those that were dropped, each in their order."""
    return sorted(file.groups, key=lambda group: file.groups[group][0].state != "stepped")


class Records:
    """A run's trajectory files, indexed with bounded memory. Thread-safe."""

    def __init__(self, run_dir: Path) -> None:
        self._directory = run_dir / "trajectories"
        self._files: OrderedDict[str, RecordFile] = OrderedDict()
        self._read: OrderedDict[tuple[str, int, tuple[int, int, int]], dict[str, Any]] = OrderedDict()
        self._lock = threading.Lock()

    def file(self, kind: Kind, number: int) -> RecordFile:
        """Returns an up-to-date index; raises NotFound if there is no such file."""
        with self._lock:
            return self._file(kind, number)

    def read(self, kind: Kind, number: int, line: int) -> tuple[EpisodeSummary, dict[str, Any]]:
        """Returns a record and its summary; raises NotFound if there is none.

        The line determines the part of failed and stale episodes; `number` is ignored.
        """
        with self._lock:
            file = self._file(kind, part_of(line) if kind in IN_PARTS else number)
            key = (file.path.name, line, file.seen)
            if key not in self._read:
                self._read[key] = file.read(line)
            self._read.move_to_end(key)
            while len(self._read) > MOST_RECORDS:
                self._read.popitem(last=False)
            return file.at(line), self._read[key]

    def numbers(self, kind: Kind) -> list[int]:
        """Returns the steps for which there is a file, or the parts of failed or stale episodes, in order."""
        if kind in IN_PARTS:
            return list(range(1, len(parts(self._whole(kind))) + 1))
        steps = (path.stem.removeprefix(f"{kind}_") for path in self._directory.glob(f"{kind}_*.jsonl"))
        return sorted(int(step) for step in steps if step.isdigit())

    def written(self, kind: Kind, number: int) -> float:
        """Returns the Unix time of the last write to a part of failed or stale episodes."""
        return nth_part(self._whole(kind), number).stat().st_mtime

    def _whole(self, kind: Kind) -> Path:
        return self._directory / f"{kind}.jsonl"

    def _file(self, kind: Kind, number: int) -> RecordFile:
        names = {**IN_PARTS, "eval": f"evaluation at step {number}"}
        path, first = self._directory / f"{kind}_{number:06d}.jsonl", 0
        if kind in IN_PARTS:
            path, first = nth_part(self._whole(kind), number), PART_LINES * (number - 1)
        file = self._files.get(path.name) or RecordFile(path, names.get(kind, f"step {number}"), first)
        file.refresh()
        self._files[path.name] = file
        self._files.move_to_end(path.name)
        while len(self._files) > 1 and self._indexed() > MOST_SUMMARIES:
            self._files.popitem(last=False)
        return file

    def _indexed(self) -> int:
        return sum(len(file.summaries) for file in self._files.values())

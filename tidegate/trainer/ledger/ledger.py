"""Append-only log of every attempt and group: each is entered once and ends once.

`ledger.jsonl` has one entry per line, numbered by `seq`. Only the trainer writes it. Once it has
`PART_BYTES`, the next entry begins the next part, `ledger.2.jsonl`; a part that is followed by another is
complete. A line is passed to the operating system before the decision it records takes effect, so no entry is
lost if the process is killed.
`record` therefore writes on the caller's event loop: admission decides without waiting, and decisions that
were made while an entry waits for a writer would take effect, or be based on one, before it is in the file.
An entry is short, and its write ends in the system's page cache.

`durable` protects the entries against a lost machine. It may take seconds, runs in a thread, and is awaited
before each effect that outlives the machine: a version's weights are written or sent to an engine, a
checkpoint's marker is written, clients' episodes or an operator's request are deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, cast

import orjson

from tidegate import failpoints
from tidegate.errors import LedgerError
from tidegate.trainer.ledger.entries import LedgerEntry
from tidegate.trainer.ledger.jsonl import (
    PART_BYTES,
    AppendedFile,
    complete_lines,
    drop_torn_line,
    nth_part,
    parts,
    read_jsonl,
    remedy,
)
from tidegate.trainer.waits import run_to_completion


class Ledger(AppendedFile):
    """Opens or continues the ledger at `path`. `position` is the `seq` of the next entry."""

    def __init__(self, path: Path, part_bytes: int = PART_BYTES) -> None:
        self.path = path
        self.position = 0
        self.checksum = 0
        """CRC-32 of all entries so far."""
        self._part_bytes = part_bytes
        self._number = max(1, len(parts(path)))
        # An incomplete line was never acted upon: its decision did not take effect.
        drop_torn_line(nth_part(path, self._number))
        for line in complete_lines(path):
            self.position += 1
            self.checksum = zlib.crc32(line, self.checksum)
        self._full: list[IO[bytes]] = []
        """Complete parts that may not be on the disk yet."""
        self._failure: str | None = None
        """Why an entry or a sync failed: nothing is recorded after it."""
        self._syncing = asyncio.Lock()
        self._open()

    def _open(self) -> None:
        part = nth_part(self.path, self._number)
        # Unbuffered: when `record` returns, the entry is in the system's page cache, which a killed process
        # does not lose.
        self._file = open(part, "ab", buffering=0)  # noqa: SIM115 - owned until close()
        self._size = self._file.tell()

    def close(self) -> None:
        for file in (*self._full, self._file):
            file.close()

    def record(self, entry: LedgerEntry) -> None:
        """Append an entry.

        Raises LedgerError if it cannot be written, for example to a full disk, and after a failure of this or
        of a sync: the caller's state has the entry that failed, so a later one would contradict the ledger.
        """
        if self._failure is not None:
            raise LedgerError(self._failure)
        line: LedgerEntry = {"seq": self.position, "time": round(time.time(), 3), **entry}
        data = orjson.dumps(line) + b"\n"
        try:
            with failpoints.around(f"ledger.{entry['kind']}.{entry.get('state', entry['event'])}"):
                self._append(data)
        except OSError as error:
            what = entry.get("id", entry["event"])
            self._failure = f"{self.path}: cannot record {what}: {error.strerror}; {remedy(error)}"
            raise LedgerError(self._failure) from error
        self.position += 1
        self.checksum = zlib.crc32(data, self.checksum)

    def _append(self, data: bytes) -> None:
        """Write a line, or nothing of it if an error occurs."""
        if self._size >= self._part_bytes:
            self._begin_part()
        rest = data
        try:
            while rest:
                # An unbuffered write may take only a part of the data.
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._file.truncate(self._size)
            raise
        self._size += len(data)

    def _begin_part(self) -> None:
        complete = self._file
        self._number += 1
        try:
            self._open()
        except OSError:
            self._number -= 1
            raise
        self._full.append(complete)

    async def durable(self) -> None:
        """Force all entries so far to disk. Raises LedgerError if that fails, or failed before.

        The system reports a failed sync once, and another sync may pass although entries are lost. So there
        is one at a time, and a cancellation waits for it: each caller learns of the failure.
        """
        await run_to_completion(self._sync())

    async def _sync(self) -> None:
        async with self._syncing:
            if self._failure is not None:
                raise LedgerError(self._failure)
            full = list(self._full)
            # Duplicates stay open in the thread even if `close` is called meanwhile.
            handles = [os.dup(file.fileno()) for file in (*full, self._file)]
            if full:  # the names of the new parts, too
                handles.append(os.open(self.path.parent, os.O_RDONLY))
            try:
                await asyncio.to_thread(_sync_and_close, handles)
            except OSError as error:
                # Remembered: a later sync may pass although entries of this one are lost.
                self._failure = f"{self.path}: cannot sync: {error.strerror}; {remedy(error)}"
                raise LedgerError(self._failure) from error
            for file in full:
                self._full.remove(file)
                file.close()


def _sync_and_close(handles: Sequence[int]) -> None:
    with contextlib.ExitStack() as stack:
        for handle in handles:
            stack.callback(os.close, handle)
        for handle in handles:
            os.fsync(handle)


def read_ledger(path: Path) -> Iterator[LedgerEntry]:
    """Yield the entries in order, without an incomplete last line.

    Raises LedgerError if the file is missing or another line is damaged.
    """
    if not path.exists():
        raise LedgerError(f"{path}: there is no ledger; is this the directory of a run?")
    yield from cast(Iterator[LedgerEntry], read_jsonl(path, LedgerError))

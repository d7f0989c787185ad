"""Append-only log of every attempt and group: each is entered once and ends once.

`ledger.jsonl` has one entry per line, numbered by `seq`. Only the trainer writes it. A line is passed to the
operating system before the decision it records takes effect, so no entry is lost if the process is killed.
`record` therefore writes on the caller's event loop: admission decides without waiting, and decisions that
were made while an entry waits for a writer would take effect, or be based on one, before it is in the file.
An entry is short, and its write ends in the system's page cache.

`durable` protects the entries against a lost machine. It may take seconds, runs in a thread, and is awaited
before each effect that outlives the machine: a version's weights are written or sent to an engine, a
checkpoint's marker is written, clients' episodes or an operator's request are deleted.
"""

from __future__ import annotations

import asyncio
import os
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import orjson

from tidegate import failpoints
from tidegate.errors import LedgerError
from tidegate.trainer.ledger.entries import LedgerEntry
from tidegate.trainer.ledger.jsonl import AppendedFile, complete_lines, read_jsonl, remedy


class Ledger(AppendedFile):
    """Opens or continues the ledger at `path`. `position` is the `seq` of the next entry."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0
        self.checksum = 0
        """CRC-32 of all entries so far."""
        self._size = 0
        for line in complete_lines(path):
            self.position += 1
            self.checksum = zlib.crc32(line, self.checksum)
            self._size += len(line)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - owned until close()
        # An incomplete line was never acted upon: its decision did not take effect.
        self._file.truncate(self._size)

    def record(self, entry: LedgerEntry) -> None:
        """Append an entry. Raises LedgerError if it cannot be written, for example to a full disk."""
        line: LedgerEntry = {"seq": self.position, "time": round(time.time(), 3), **entry}
        data = orjson.dumps(line) + b"\n"
        try:
            with failpoints.around(f"ledger.{entry['kind']}.{entry.get('state', entry['event'])}"):
                self._append(data)
        except OSError as error:
            what = entry.get("id", entry["event"])
            raise LedgerError(
                f"{self.path}: cannot record {what}: {error.strerror}; {remedy(error)}"
            ) from error
        self.position += 1
        self.checksum = zlib.crc32(data, self.checksum)

    def _append(self, data: bytes) -> None:
        """Write a line, or nothing of it if an error occurs: the next entry begins a line."""
        rest = data
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._file.truncate(self._size)
            raise
        self._size += len(data)

    async def durable(self) -> None:
        """Force all entries so far to disk. Raises LedgerError if that fails."""
        handle = os.dup(self._file.fileno())
        try:
            await asyncio.to_thread(_sync_and_close, handle)
        except OSError as error:
            raise LedgerError(f"{self.path}: cannot sync: {error.strerror}; {remedy(error)}") from error


def _sync_and_close(handle: int) -> None:
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_ledger(path: Path) -> Iterator[LedgerEntry]:
    """Yield the entries in order, without an incomplete last line.

    Raises LedgerError if the file is missing or another line is damaged.
    """
    if not path.exists():
        raise LedgerError(f"{path}: there is no ledger; is this the directory of a run?")
    yield from cast(Iterator[LedgerEntry], read_jsonl(path, LedgerError))

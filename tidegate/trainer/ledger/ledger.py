"""Append-only log of every attempt and group: each is entered once and ends once.

`ledger.jsonl` has one entry per line, numbered by `seq`. Only the trainer writes it. A line is passed to the
operating system before the decision it records takes effect, so no entry is lost if the process is killed.
`sync` protects it against a lost machine, and is called before a checkpoint's marker is written.
"""

from __future__ import annotations

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
from tidegate.trainer.ledger.jsonl import AppendedFile, complete_lines, read_jsonl


class Ledger(AppendedFile):
    """Opens or continues the ledger at `path`. `position` is the `seq` of the next entry."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0
        self.checksum = 0
        """CRC-32 of all entries so far."""
        size = 0
        for line in complete_lines(path):
            self.position += 1
            self.checksum = zlib.crc32(line, self.checksum)
            size += len(line)
        self._file = open(path, "ab")  # noqa: SIM115 - owned until close()
        # An incomplete line was never acted upon: its decision did not take effect.
        self._file.truncate(size)

    def record(self, entry: LedgerEntry) -> None:
        """Append an entry. Raises LedgerError if it cannot be written, for example to a full disk."""
        line: LedgerEntry = {"seq": self.position, "time": round(time.time(), 3), **entry}
        try:
            with failpoints.around(f"ledger.{entry['kind']}.{entry.get('state', entry['event'])}"):
                data = orjson.dumps(line) + b"\n"
                self._file.write(data)
                self._file.flush()
                if entry["kind"] == "run":  # a published version must never be reused
                    self.sync()
        except OSError as error:
            raise LedgerError(f"{self.path}: cannot record {entry.get('id')}: {error.strerror}") from error
        self.position += 1
        self.checksum = zlib.crc32(data, self.checksum)

    def sync(self) -> None:
        """Force all entries so far to disk."""
        os.fsync(self._file.fileno())


def read_ledger(path: Path) -> Iterator[LedgerEntry]:
    """Yield the entries in order, without an incomplete last line.

    Raises LedgerError if the file is missing or another line is damaged.
    """
    if not path.exists():
        raise LedgerError(f"{path}: there is no ledger; is this the directory of a run?")
    yield from cast(Iterator[LedgerEntry], read_jsonl(path, LedgerError))

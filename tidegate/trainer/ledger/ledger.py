"""The ledger: the book in which every slot attempt and every group is entered once and ends once.

`ledger.jsonl` is append-only, one entry a line, numbered by `seq`. The trainer alone writes it. A line
is handed to the operating system before the decision it records takes effect, so a killed process
loses nothing; `sync` makes it proof against a lost machine and is called before a checkpoint's marker.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import cast

import orjson

from tidegate import failpoints
from tidegate.errors import LedgerError
from tidegate.trainer.ledger.entries import LedgerEntry
from tidegate.trainer.ledger.jsonl import whole_lines


class Ledger:
    """Opens (or goes on with) the book at `path`. `position` is the `seq` of the next entry."""

    def __init__(self, path: Path) -> None:
        self.path = path
        kept, self.position = whole_lines(path)
        self.checksum = zlib.crc32(path.read_bytes()[:kept]) if kept else 0
        """CRC-32 of all entries so far."""
        self._file = open(path, "ab")  # noqa: SIM115 - owned until close()
        # A line that was torn by a crash was never acted upon: what it announced did not happen.
        self._file.truncate(kept)

    def book(self, one: LedgerEntry) -> None:
        """Enter one entry; raises LedgerError where it cannot be written (a full disk, say)."""
        line: LedgerEntry = {"seq": self.position, "time": round(time.time(), 3), **one}
        try:
            with failpoints.around(f"ledger.{one['kind']}.{one.get('state', one['event'])}"):
                data = orjson.dumps(line) + b"\n"
                self._file.write(data)
                self._file.flush()
                if one["kind"] == "run":  # a version that was published is never given again
                    self.sync()
        except OSError as error:
            raise LedgerError(f"{self.path}: cannot enter {one.get('id')}: {error.strerror}") from error
        self.position += 1
        self.checksum = zlib.crc32(data, self.checksum)

    def sync(self) -> None:
        """Force everything entered so far to the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_ledger(path: Path) -> Iterator[LedgerEntry]:
    """Every whole entry, in order; a torn last line is left out.

    Raises LedgerError on a missing file or a damaged line before the last.
    """
    if not path.exists():
        raise LedgerError(f"{path}: there is no ledger; is this the directory of a run?")
    kept, _ = whole_lines(path)
    with open(path, "rb") as file:
        for number, line in enumerate(file):
            if file.tell() > kept:
                return
            try:
                yield cast(LedgerEntry, orjson.loads(line))
            except orjson.JSONDecodeError as error:
                raise LedgerError(f"{path}: line {number + 1} is damaged: {error}") from error

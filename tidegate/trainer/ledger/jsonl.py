"""Reads append-only JSONL files, whose last line is incomplete after a crash, and repairs them."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Self

import orjson

from tidegate.errors import TidegateError

PART_BYTES = 64 << 20
"""Size from which the next line begins a new part."""
BLOCK = 1 << 16
"""Bytes that are searched at a time for the end of the last complete line."""


def nth_part(path: Path, number: int) -> Path:
    """Return the path of a part of a file: `x.jsonl` is the first one, `x.2.jsonl` the second."""
    return path if number == 1 else path.with_name(f"{path.stem}.{number}{path.suffix}")


def parts(path: Path) -> list[Path]:
    """Return the existing parts of a file in order. Only the last one is written to."""
    found: list[Path] = []
    while (part := nth_part(path, len(found) + 1)).exists():
        found.append(part)
    return found


def complete_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of all parts that end in a newline; none if the file does not exist."""
    for part in parts(path):
        yield from _complete_lines(part)


def _complete_lines(part: Path) -> Iterator[bytes]:
    with part.open("rb") as file:
        yield from (line for line in file if line.endswith(b"\n"))


def read_jsonl(path: Path, raised: type[TidegateError] = TidegateError) -> Iterator[Any]:
    """Yield the values of the complete lines of all parts. Raises `raised` if one is damaged."""
    for part in parts(path):
        for number, line in enumerate(_complete_lines(part), start=1):
            try:
                yield orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise raised(f"{part}, line {number}: not JSON: {error}") from error


def drop_torn_line(path: Path) -> None:
    """Remove an incomplete last line, so that the next append starts a new line."""
    if not path.exists():
        return
    with path.open("rb") as file:
        size = whole = file.seek(0, os.SEEK_END)
        newline = -1
        while newline < 0 < whole:
            whole, end = max(0, whole - BLOCK), whole
            file.seek(whole)
            newline = file.read(end - whole).rfind(b"\n")
    if (complete := whole + newline + 1) < size:
        os.truncate(path, complete)


DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def remedy(error: OSError) -> str:
    """Return what to do about a file that a run cannot write."""
    what = "free some space" if error.errno in DISK_FULL else "make it accessible"
    return f"{what}, then continue with --resume"


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file in the errors of writing to it; the system names it only in those of opening it."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def sync(path: Path) -> None:
    """Sync a file, or a directory's entries, to disk."""
    # Read-only, as a directory cannot be opened for writing.
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class AppendedFile:
    """A file that is open for appending until `close` or the end of a `with` block."""

    _file: IO[Any]

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

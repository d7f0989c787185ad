"""Reads append-only JSONL files, whose last line is incomplete after a crash, and repairs them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import orjson

from tidegate.errors import TidegateError


def complete_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines that end in a newline; none if the file does not exist."""
    if path.exists():
        with path.open("rb") as file:
            yield from (line for line in file if line.endswith(b"\n"))


def read_jsonl(path: Path, raised: type[TidegateError] = TidegateError) -> Iterator[Any]:
    """Yield the values of the complete lines. Raises `raised` if one is damaged."""
    for number, line in enumerate(complete_lines(path), start=1):
        try:
            yield orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise raised(f"{path}, line {number}: not JSON: {error}") from error


def drop_torn_line(path: Path) -> None:
    """Remove an incomplete last line, so that the next append starts a new line."""
    size = sum(map(len, complete_lines(path)))
    if path.exists() and path.stat().st_size > size:
        os.truncate(path, size)


class AppendedFile:
    """A file that is open for appending until `close` or the end of a `with` block."""

    _file: IO[Any]

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

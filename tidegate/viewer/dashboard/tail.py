"""Follows files that a run appends to, reading each byte once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import orjson

BLOCK = 1 << 22


class Tail:
    """The JSON lines of a file, each handed out once.

    A last line without its end is being written: it is left for the next time. `broken` counts whole
    lines that are not JSON objects. A file that was replaced or cut is noticed by `restarted`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.broken = 0
        self._last = b""

    def restarted(self) -> bool:
        """Whether the file is another one than was read so far; it is then read from its start again."""
        try:
            with open(self.path, "rb") as file:
                same = goes_on(file, self.offset, self._last)
        except FileNotFoundError:
            same = not self.offset
        if not same:
            self.offset, self.broken, self._last = 0, 0, b""
        return not same

    def objects(self) -> Iterator[dict[str, Any]]:
        """What was appended since the last time."""
        try:
            file = open(self.path, "rb")  # noqa: SIM115 - closed by the with below
        except FileNotFoundError:
            return
        with file:
            for _, line in whole_lines(file, self.offset):
                self.offset += len(line)
                self._last = line
                found = json_object(line)
                if found is not None:
                    yield found
                else:
                    self.broken += bool(line.strip())


def goes_on(file: BinaryIO, offset: int, last: bytes) -> bool:
    """Whether the line that was read last, up to `offset`, still stands there.

    Inodes and sizes don't tell: both may come again in a file that was written anew.
    """
    file.seek(offset - len(last))
    return file.read(len(last)) == last


def whole_lines(file: BinaryIO, start: int) -> Iterator[tuple[int, bytes]]:
    """(offset, line with its newline) of every complete line of a binary file from `start` on."""
    file.seek(start)
    rest = b""
    at = start
    while block := file.read(BLOCK):
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            yield at, line + b"\n"
            at += len(line) + 1


def json_object(line: bytes) -> dict[str, Any] | None:
    """One line as a JSON object; None where it is not one."""
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError:
        # orjson takes neither NaN nor lone surrogates, which other writers leave in their files.
        try:
            found = json.loads(line.decode("utf-8", errors="replace"))
        except ValueError:
            return None
    return found if isinstance(found, dict) else None

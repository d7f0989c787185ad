"""Follows files that a run appends to, reading each byte once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tidegate.service import exact
from tidegate.trainer.ledger.jsonl import nth_part

BLOCK = 1 << 22


class Tail:
    """Returns each JSON line of a growing file once, also of its further parts.

    An incomplete last line is left for the next call. `broken` counts complete lines that are not JSON
    objects. `restarted` detects that the file was replaced or truncated.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begin()

    def _begin(self) -> None:
        self.offset = 0
        """Bytes read so far, of all parts."""
        self.broken = 0
        self._number = 1
        self._earlier = 0
        """Bytes of the parts before the current one."""
        self._last = b""
        """The last line that was read from the current part."""

    @property
    def part(self) -> Path:
        """The part that is read."""
        return nth_part(self.path, self._number)

    def restarted(self) -> bool:
        """Returns whether the file was replaced; if so, the next read starts at the beginning."""
        try:
            with open(self.part, "rb") as file:
                same = goes_on(file, self.offset - self._earlier, self._last)
        except FileNotFoundError:
            same = not self.offset
        if not same:
            self._begin()
        return not same

    def objects(self) -> Iterator[dict[str, Any]]:
        """Yields the objects appended since the last call."""
        while True:
            # Looked for first: nothing is appended to a part that is followed by another.
            followed = nth_part(self.path, self._number + 1).exists()
            yield from self._objects()
            if not followed:
                return
            self._number, self._earlier, self._last = self._number + 1, self.offset, b""

    def _objects(self) -> Iterator[dict[str, Any]]:
        try:
            file = open(self.part, "rb")  # noqa: SIM115 - closed by the with below
        except FileNotFoundError:
            return
        with file:
            for _, line in whole_lines(file, self.offset - self._earlier):
                self.offset += len(line)
                self._last = line
                value = json_object(line)
                if value is not None:
                    yield value
                else:
                    self.broken += bool(line.strip())


def goes_on(file: BinaryIO, offset: int, last: bytes) -> bool:
    """Returns whether the last line read still ends at `offset`.

    Inode and size are not sufficient: a rewritten file may have the same ones.
    """
    file.seek(offset - len(last))
    return file.read(len(last)) == last


def whole_lines(file: BinaryIO, start: int) -> Iterator[tuple[int, bytes]]:
    """Yields (offset, line with its newline) of each complete line of a binary file from `start` on."""
    file.seek(start)
    rest = b""
    at = start
    while block := file.read(BLOCK):
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            yield at, line + b"\n"
            at += len(line) + 1


def json_object(line: bytes) -> dict[str, Any] | None:
    """Returns a line as a JSON object; None if it is not one."""
    try:
        value = exact.loads(line)
    except ValueError:
        # The parser refuses NaN and lone surrogates, which other writers may produce.
        try:
            value = json.loads(line.decode("utf-8", errors="replace"))
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, dict) else None

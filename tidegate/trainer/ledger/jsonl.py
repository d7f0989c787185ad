"""Files of lines that are only ever added to, as a killed process leaves them."""

from __future__ import annotations

import os
from pathlib import Path


def whole_lines(path: Path) -> tuple[int, int]:
    """Bytes and number of the lines that end in a newline; none of a file that is not there."""
    if not path.exists():
        return 0, 0
    data = path.read_bytes()
    return data.rfind(b"\n") + 1, data.count(b"\n")


def drop_torn_line(path: Path) -> None:
    """Remove what a killed process left of its last line, so that the next one begins a line of its own."""
    kept, _ = whole_lines(path)
    if path.exists() and path.stat().st_size > kept:
        os.truncate(path, kept)

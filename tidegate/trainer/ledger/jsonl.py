"""Repair of append-only JSONL files after a crash."""

from __future__ import annotations

import os
from pathlib import Path


def complete_lines(path: Path) -> tuple[int, int]:
    """Return the size in bytes and the number of complete lines; zeros if the file does not exist."""
    if not path.exists():
        return 0, 0
    data = path.read_bytes()
    return data.rfind(b"\n") + 1, data.count(b"\n")


def drop_torn_line(path: Path) -> None:
    """Remove an incomplete last line, so that the next append starts a new line."""
    size, _ = complete_lines(path)
    if path.exists() and path.stat().st_size > size:
        os.truncate(path, size)

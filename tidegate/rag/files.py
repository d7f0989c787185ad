"""Files that are whole or absent, and what they hold said in 32 hex digits."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

_BLOCK = 1 << 22
_PARTS, _PART = 256, 1 << 16


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Have `write` make the file beside its place, and put it there when it is on the disk."""
    part = path.with_name(path.name + ".part")
    write(part)
    sync(part)
    os.replace(part, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Have a file, or a directory's entries, on the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def digest(path: Path) -> str:
    """BLAKE2b of the whole file: about a second a gigabyte."""
    hashed = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            hashed.update(block)
    return hashed.hexdigest()


def glance(path: Path) -> str:
    """BLAKE2b of 256 pieces, 16 MB in all, spread evenly from a file's first bytes to its last.

    It notices a file that was cut, swapped or overwritten, not a flipped bit between the pieces.
    """
    hashed = hashlib.blake2b(digest_size=16)
    last = max(0, path.stat().st_size - _PART)
    with path.open("rb") as file:
        for start in sorted({last * number // (_PARTS - 1) for number in range(_PARTS)}):
            file.seek(start)
            hashed.update(file.read(_PART))
    return hashed.hexdigest()

"""Files that are whole or absent, and what they hold said in 32 hex digits."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

_BLOCK = 1 << 22


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Have `write` make the file beside its place, and put it there when it is on the disk."""
    part = path.with_name(path.name + ".part")
    write(part)
    with part.open("rb+") as file:
        os.fsync(file.fileno())
    os.replace(part, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def digest(path: Path) -> str:
    """BLAKE2b of the whole file."""
    hashed = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            hashed.update(block)
    return hashed.hexdigest()

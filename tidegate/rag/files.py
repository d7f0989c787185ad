"""Atomic file replacement, and digests of files as 32 hex digits."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

_PARTS, _PART = 256, 1 << 16


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Calls `write` with a temporary path, flushes the file to disk and renames it to `path`."""
    part = path.with_name(path.name + ".part")
    write(part)
    sync(part)
    os.replace(part, path)
    sync(path.parent)


def replace_array(path: Path, array: npt.NDArray[np.float32]) -> None:
    def write(part: Path) -> None:
        with part.open("wb") as file:
            np.save(file, array)

    replace_file(path, write)


def sync(path: Path) -> None:
    """Flushes a file or a directory's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest(path: Path) -> str:
    """Returns the BLAKE2b digest of the whole file; takes about a second per gigabyte."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def quick_digest(path: Path) -> str:
    """Returns the BLAKE2b digest of 256 pieces, 16 MB in all, spread evenly over the file.

    Detects a file that was truncated, exchanged or overwritten, but not a flipped bit between the pieces.
    """
    hasher = hashlib.blake2b(digest_size=16)
    last = max(0, path.stat().st_size - _PART)
    with path.open("rb") as file:
        for start in sorted({last * number // (_PARTS - 1) for number in range(_PARTS)}):
            file.seek(start)
            hasher.update(file.read(_PART))
    return hasher.hexdigest()

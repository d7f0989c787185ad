"""The checksum of weights: Σ crc32(name) · (1 + Σ words) mod 2^61 − 1, over tensors in any order.

A tensor's words are its bytes as signed 64-bit integers, padded with zeros, whose sum wraps. The checksum
detects damaged, missing and misplaced tensors, but not deliberate forgery.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

MODULUS = 2**61 - 1
FILE = "checksum.json"
"""File that holds the checksum, beside the safetensors."""
WORD = 8
"""Bytes."""

Bytes: TypeAlias = NDArray[np.uint8]


def of_tensor(name: str, data: Bytes) -> int:
    aligned = data.size - data.size % WORD
    words = int(np.add.reduce(data[:aligned].view("<i8"), dtype=np.int64))
    return of_words(name, words + int.from_bytes(data[aligned:].tobytes(), "little"))


def of_words(name: str, words: int) -> int:
    """Return the checksum of a tensor, given the sum of its words."""
    return zlib.crc32(name.encode()) * (1 + words % MODULUS) % MODULUS


def of_files(directory: Path) -> int:
    """Return the checksum of all safetensors of a directory. Raises OSError, ValueError."""
    paths = sorted(directory.glob("*.safetensors"))
    parts = (of_tensor(name, data) for path in paths for name, data in tensors_of_file(path))
    return sum(parts) % MODULUS


def of_file(path: Path) -> int:
    """Return the checksum of any file, with its name. Raises OSError."""
    empty = path.stat().st_size == 0  # an empty file cannot be mapped
    return of_tensor(path.name, np.empty(0, np.uint8) if empty else np.memmap(path, np.uint8, "r"))


def write(directory: Path, total: int | None = None) -> None:
    """Write the checksum of a directory's safetensors, `total` if it is known."""
    total = of_files(directory) if total is None else total
    (directory / FILE).write_text(json.dumps({"checksum": total}) + "\n")


def find_damage(directory: Path) -> str | None:
    """Describe a checksum mismatch of a directory's safetensors; None if they match or have no checksum."""
    try:
        expected = json.loads((directory / FILE).read_text())["checksum"]
        actual = of_files(directory)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{directory}: cannot compare the weights with {FILE}: {error!r}"
    if actual == expected:
        return None
    return (
        f"{directory}: its weights are not those that were written (checksum {actual}, not {expected}): a "
        f"file was damaged or replaced; if that is intended, delete {FILE}"
    )


def tensors_of_file(path: Path, mode: Literal["r", "r+"] = "r") -> Iterator[tuple[str, Bytes]]:
    """Yield the tensors of a safetensors file, mapped in this mode. Raises OSError, ValueError."""
    data = np.memmap(path, np.uint8, mode)
    size = int(data[:WORD].view("<u8")[0])
    header = json.loads(data[WORD : WORD + size].tobytes())
    for name, tensor in header.items():
        if name != "__metadata__":
            begin, end = tensor["data_offsets"]
            yield name, data[WORD + size + begin : WORD + size + end]

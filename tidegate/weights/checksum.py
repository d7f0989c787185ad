"""The checksum of weights: Σ crc32(name) · (1 + Σ words) mod 2^61 − 1, over tensors in any order.

A tensor's words are its bytes, eight at a time as signed integers whose sum wraps at 64 bits; what is left of
the last word is filled with zeros. It finds what was damaged, went missing or came into the wrong place, not
a forger.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

MODULUS = 2**61 - 1
FILE = "checksum.json"
"""Beside the safetensors that it is of."""
WORD = 8
"""Bytes."""

Bytes: TypeAlias = NDArray[np.uint8]


def of_tensor(name: str, data: Bytes) -> int:
    """Of one tensor; those of several add up, mod MODULUS."""
    whole = data.size - data.size % WORD
    words = int(np.add.reduce(data[:whole].view("<i8"), dtype=np.int64))
    words += int.from_bytes(data[whole:].tobytes(), "little")
    return zlib.crc32(name.encode()) * (1 + words % MODULUS) % MODULUS


def of_files(directory: Path) -> int:
    """Of all safetensors of a directory. Raises OSError, ValueError where one cannot be read."""
    parts = (of_tensor(*one) for path in sorted(directory.glob("*.safetensors")) for one in _tensors(path))
    return sum(parts) % MODULUS


def of_file(path: Path) -> int:
    """Of a whole file under its name, whatever it holds. Raises OSError."""
    empty = path.stat().st_size == 0  # which cannot be mapped
    return of_tensor(path.name, np.empty(0, np.uint8) if empty else np.memmap(path, np.uint8, "r"))


def write(directory: Path) -> None:
    """Keep the checksum of what was just written there. Raises OSError."""
    (directory / FILE).write_text(json.dumps({"checksum": of_files(directory)}) + "\n")


def find_damage(directory: Path) -> str | None:
    """What is wrong with safetensors whose checksum was kept; None where nothing is, or none was kept."""
    try:
        kept = json.loads((directory / FILE).read_text())["checksum"]
        found = of_files(directory)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{directory}: its weights cannot be held against {FILE}: {error!r}"
    if found == kept:
        return None
    return (
        f"{directory}: its weights are not those that were written (checksum {found}, not {kept}): a file "
        f"was damaged or exchanged; where that is meant, delete {FILE}"
    )


def _tensors(path: Path) -> Iterator[tuple[str, Bytes]]:
    """The tensors of a safetensors file: its head's length, its head in JSON, then their bytes."""
    data = np.memmap(path, np.uint8, "r")
    size = int(data[:WORD].view("<u8")[0])
    head = json.loads(data[WORD : WORD + size].tobytes())
    for name, one in head.items():
        if name != "__metadata__":
            begin, end = one["data_offsets"]
            yield name, data[WORD + size + begin : WORD + size + end]

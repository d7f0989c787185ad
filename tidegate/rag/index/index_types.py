"""Vector index types: their sizes, and the choice of one for a corpus."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tidegate.errors import ConfigError

IndexKind = Literal["flat", "sq8", "ivf-flat", "ivf-sq8", "ivf-pq"]
KINDS: tuple[IndexKind, ...] = ("flat", "sq8", "ivf-flat", "ivf-sq8", "ivf-pq")

FLOAT32 = 4
FLAT_UP_TO = 16e6
"""Maximum bytes of float32 vectors for `flat`.

From about 3,000 × 384 on, inverted lists are faster; up to this size Flat takes a millisecond at most, and
encoding the query takes longer. docs/rag.md has the measurements.
"""
IVF_SQ8_UP_TO = 100e9
"""Maximum bytes of float32 vectors for `ivf-sq8`; above it, a byte per component is too much to store."""
PQ_DIMENSIONS = 8
"""Vector components per byte of a product-quantised code."""
PQ_MIN_DOCUMENTS = 39 * 256
"""Minimum number of training vectors for product quantisation, as FAISS recommends."""
_ROW = 8
"""Bytes of a row number in an inverted list."""
_MIN_PER_LIST = 39
"""Minimum number of training vectors per inverted list, as FAISS recommends."""
_PER_LIST = 40
"""Training vectors per inverted list, if there are as many."""


@dataclass(frozen=True, slots=True)
class IndexTypeChoice:
    """An index type, and the reason for it."""

    kind: IndexKind
    reason: str


def choose(count: int, dimension: int) -> IndexTypeChoice:
    """Returns the index type for this many vectors: exact search where it is not slower than encoding."""
    total = count * dimension * FLOAT32
    floats = f"{size(total)} of float32"
    if total <= FLAT_UP_TO:
        return IndexTypeChoice("flat", f"exact search; scanning {size(total)} is fast")
    lists = "inverted lists, one byte per"
    if total <= IVF_SQ8_UP_TO:
        return IndexTypeChoice("ivf-sq8", f"scanning {floats} is slow: {lists} component")
    return IndexTypeChoice("ivf-pq", f"{floats} is too much to store: {lists} 8 components")


def check_kind(kind: IndexKind, count: int) -> None:
    if kind == "ivf-pq" and count < PQ_MIN_DOCUMENTS:
        raise ConfigError(
            f"ivf-pq has a minimum of {PQ_MIN_DOCUMENTS:,} documents, and there are {count:,}: use"
            " --index flat"
        )


def code_bytes(kind: IndexKind, dimension: int) -> int:
    """Returns the bytes of a stored vector, with its row number in an inverted list."""
    codes = {"flat": dimension * FLOAT32, "pq": subquantizers(dimension), "sq8": dimension}
    return codes[kind.removeprefix("ivf-")] + (_ROW if kind.startswith("ivf") else 0)


def subquantizers(dimension: int) -> int:
    """Returns the bytes of a product-quantised code: the dimension's divisor nearest to an eighth of it."""
    divisors = [number for number in range(1, dimension + 1) if dimension % number == 0]
    return min(divisors, key=lambda divisor: abs(divisor - dimension / PQ_DIMENSIONS))


def nlist(count: int) -> int:
    """Returns the number of inverted lists: a power of two near 4 · √n, with enough training vectors each."""
    wanted = 4 * math.sqrt(count)
    possible = max(1.0, count / _MIN_PER_LIST)
    return int(2 ** math.floor(math.log2(min(wanted, possible))))


def training_rows(kind: IndexKind, count: int) -> int:
    """Returns the number of training vectors; 0 for `flat`."""
    if kind == "flat":
        return 0
    return min(count, max(65_536, _PER_LIST * nlist(count)) if kind.startswith("ivf") else 65_536)


def factory(kind: IndexKind, count: int, dimension: int) -> str:
    """Returns the FAISS factory string; `np` skips training (2 s per byte) for polysemous search."""
    codes = {"flat": "Flat", "sq8": "SQ8", "pq": f"PQ{subquantizers(dimension)}x8np"}
    code = codes[kind.removeprefix("ivf-")]
    return f"IVF{nlist(count)},{code}" if kind.startswith("ivf") else code


def size(count: float) -> str:
    """Formats bytes with decimal units."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"

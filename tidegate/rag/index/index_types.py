"""The kinds of vector index, what each costs, and which one fits a corpus."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tidegate.errors import ConfigError
from tidegate.rag.progress import size

IndexKind = Literal["flat", "sq8", "ivf-sq8", "ivf-pq"]
KINDS: tuple[IndexKind, ...] = ("flat", "sq8", "ivf-sq8", "ivf-pq")

FLOAT32 = 4
# Up to these sizes of the float32 vectors.
FLAT_UP_TO = 2e9
SQ8_UP_TO = 8e9
IVF_SQ8_UP_TO = 100e9
PQ_DIMENSIONS = 8
"""Numbers of a vector that one byte of its product-quantised code stands for."""
PQ_FROM = 39 * 256
"""Documents that product quantisation is trained on at least, as FAISS asks for."""
_PER_CELL = 39
"""Vectors a cell is trained with at least, as FAISS asks for."""
_TRAINED_ON = 64
"""Vectors a cell is trained with, where there are as many."""


@dataclass(frozen=True, slots=True)
class IndexTypeChoice:
    """A kind, and why it is this one."""

    kind: IndexKind
    reason: str


def choose(count: int, dimension: int) -> IndexTypeChoice:
    """The kind that fits so many vectors: exact while that is affordable."""
    whole = count * dimension * FLOAT32
    if whole <= FLAT_UP_TO:
        return IndexTypeChoice("flat", f"exact, and its {size(whole)} are searched whole in no time")
    if whole <= SQ8_UP_TO:
        return IndexTypeChoice(
            "sq8", f"{size(whole)} as float32 would be slow to scan; a byte a number is a quarter"
        )
    if whole <= IVF_SQ8_UP_TO:
        return IndexTypeChoice(
            "ivf-sq8", f"{size(whole)} as float32 are too much to scan: cells, and a byte a number"
        )
    return IndexTypeChoice(
        "ivf-pq", f"{size(whole)} as float32 are too much to hold: cells, and a byte for eight numbers"
    )


def check_kind(kind: IndexKind, count: int) -> None:
    """Raises ConfigError where there are too few documents for the kind."""
    if kind == "ivf-pq" and count < PQ_FROM:
        raise ConfigError(
            f"ivf-pq has to be trained on {PQ_FROM:,} documents, and there are {count:,}: use --index flat"
        )


def code_bytes(kind: IndexKind, dimension: int) -> int:
    """Bytes that a vector takes in the index."""
    if kind == "flat":
        return dimension * FLOAT32
    if kind == "ivf-pq":
        return subquantizers(dimension) + 8
    return dimension + (8 if kind == "ivf-sq8" else 0)


def index_bytes(kind: IndexKind, count: int, dimension: int) -> int:
    """Bytes of the whole index, the cells' centres and the codes' tables included."""
    centres = cells(count) * dimension * FLOAT32 if kind.startswith("ivf") else 0
    tables = 256 * dimension * FLOAT32 if kind == "ivf-pq" else 0
    return count * code_bytes(kind, dimension) + centres + tables


def subquantizers(dimension: int) -> int:
    """Bytes of a product-quantised code: the dimension's divisor that is nearest to an eighth of it."""
    divisors = [one for one in range(1, dimension + 1) if dimension % one == 0]
    return min(divisors, key=lambda one: abs(one - dimension / PQ_DIMENSIONS))


def cells(count: int) -> int:
    """Cells of an inverted file: about 4 · √n, a power of two, each with vectors enough to be trained."""
    wanted = 4 * math.sqrt(count)
    possible = max(1.0, count / _PER_CELL)
    return int(2 ** math.floor(math.log2(min(wanted, possible))))


def training_rows(kind: IndexKind, count: int) -> int:
    """How many vectors the index is trained on; Flat needs none."""
    if kind == "flat":
        return 0
    return min(count, max(65_536, _TRAINED_ON * cells(count)) if kind.startswith("ivf") else 65_536)


def factory(kind: IndexKind, count: int, dimension: int) -> str:
    """FAISS' own name for it; `np` spares a training that only polysemous search needs (2 s a byte)."""
    inside = {"flat": "Flat", "sq8": "SQ8", "ivf-sq8": "SQ8", "ivf-pq": f"PQ{subquantizers(dimension)}x8np"}
    return f"IVF{cells(count)},{inside[kind]}" if kind.startswith("ivf") else inside[kind]

"""What a build will take, worked out from a look at the source before anything is written.

BM25's part was measured on 2,000 and on 6,000 passages of a hundred English words from the documentation of
programs; the rest follows from the formats.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from tidegate.errors import StorageError
from tidegate.rag.corpus.source import Extent
from tidegate.rag.index.index_types import FLOAT32, IndexKind, index_bytes, training_rows
from tidegate.rag.progress import size

_PER_DOCUMENT = 8 + 16
"""Bytes beside the documents: offset, id's hash and row."""
_BYTES_A_POSTING = 13.0
"""Of text, for each word that BM25 keeps, once a document."""
_BM25_DISK, _BM25_SCRATCH, _BM25_RAM = 10, 6, 60
"""Bytes a posting: in the index, in the file of words, in memory at the peak; 9.9, 5.4 and 58 measured."""
_PROCESS = 1_000_000_000
"""Python, the libraries and a small encoder: about."""


@dataclass(frozen=True, slots=True)
class IndexEstimate:
    """Bytes. `disk` is what stays, `disk_peak` what building takes on top of nothing."""

    documents: int
    disk: int
    disk_peak: int
    ram_peak: int

    def sentence(self) -> str:
        return (
            f"about {self.documents:,} documents: {size(self.disk)} of disk ({size(self.disk_peak)} while"
            f" building) and up to {size(self.ram_peak)} of memory"
        )


def estimate(found: Extent, kind: IndexKind | None, dimension: int, bm25: bool) -> IndexEstimate:
    """What building an index of this kind takes (None: no vectors), with BM25 or without."""
    count = found.documents
    disk = found.bytes + count * _PER_DOCUMENT
    scratch = 0
    ram = count * _PER_DOCUMENT
    if kind is not None:
        index = index_bytes(kind, count, dimension)
        disk += index
        scratch += count * dimension * FLOAT32
        ram = max(ram, index + training_rows(kind, count) * dimension * FLOAT32)
    if bm25:
        postings = int(found.bytes / _BYTES_A_POSTING)
        disk += postings * _BM25_DISK
        scratch += postings * _BM25_SCRATCH
        ram = max(ram, postings * _BM25_RAM)
    return IndexEstimate(count, disk, disk + scratch, ram + _PROCESS)


def check_disk(directory: Path, needed: IndexEstimate) -> None:
    """Raises StorageError where the disk has less space left than the build takes."""
    free = shutil.disk_usage(directory).free
    if free < needed.disk_peak:
        raise StorageError(
            f"{directory} has {size(free)} left, and the build takes {size(needed.disk_peak)}: make room, or"
            " choose another --out or a smaller --index"
        )


def memory_warning(needed: IndexEstimate) -> str | None:
    """What to say where the machine has less memory than the build takes."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed.ram_peak < memory:
        return None
    return (
        f"this machine has {size(memory)} of memory, and the build may take {size(needed.ram_peak)}: less"
        " with a smaller --index (sq8, ivf-sq8, ivf-pq), or without --bm25"
    )

"""Estimates the disk space and memory of a build from a sample of the source.

The numbers for BM25 were measured on 2,000 and on 6,000 passages of a hundred English words of software
documentation; the others follow from the file formats.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from tidegate.errors import StorageError
from tidegate.rag.corpus.source import Extent
from tidegate.rag.index.index_types import FLOAT32, IndexKind, index_bytes, size, training_rows
from tidegate.rag.index.vector_index import BLOCK_BYTES

_PER_DOCUMENT = 8 + 16
"""Bytes per document besides its text: offset, hash of the id, and row."""
_TEXT_PER_POSTING = 13.0
"""Bytes of text per distinct word of a document that BM25 indexes."""
_BM25_DISK, _BM25_SCRATCH, _BM25_RAM = 10, 6, 60
"""Bytes per posting in the index, in the file of words, and in memory at the peak; measured: 9.9, 5.4, 58."""
_PROCESS = 1_000_000_000
"""Approximate bytes of Python, the libraries and a small encoder."""


@dataclass(frozen=True, slots=True)
class IndexEstimate:
    """Estimated documents, and bytes of the finished index, of the disk peak and of the memory peak."""

    documents: int
    disk: int
    disk_peak: int
    ram_peak: int

    def summary(self) -> str:
        return (
            f"about {self.documents:,} documents: {size(self.disk)} of disk ({size(self.disk_peak)} while"
            f" building) and up to {size(self.ram_peak)} of memory"
        )


def estimate(extent: Extent, kind: IndexKind | None, dimension: int, bm25: bool) -> IndexEstimate:
    """Estimates the resources for an index of this kind (None: no vectors), with or without BM25."""
    count = extent.documents
    disk = extent.bytes + count * _PER_DOCUMENT
    scratch = 0
    ram = count * _PER_DOCUMENT
    if kind is not None:
        index = index_bytes(kind, count, dimension)
        disk += index
        scratch += count * dimension * FLOAT32
        held = index
        if kind.startswith("ivf"):  # built in blocks, which are on disk until they are merged
            scratch += index
            held = min(index, 2 * BLOCK_BYTES)  # lists grow by doubling
        ram = max(ram, held + training_rows(kind, count) * dimension * FLOAT32)
    if bm25:
        postings = int(extent.bytes / _TEXT_PER_POSTING)
        disk += postings * _BM25_DISK
        scratch += postings * _BM25_SCRATCH
        ram = max(ram, postings * _BM25_RAM)
    return IndexEstimate(count, disk, disk + scratch, ram + _PROCESS)


def check_disk(directory: Path, needed: IndexEstimate) -> None:
    free = shutil.disk_usage(directory).free
    if free < needed.disk_peak:
        raise StorageError(
            f"{directory} has {size(free)} left, and the build needs {size(needed.disk_peak)}: free space,"
            " or choose another --out or a smaller --index"
        )


def memory_warning(needed: IndexEstimate) -> str | None:
    """Returns a warning if the machine has less memory than the build may need, else None."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed.ram_peak < memory:
        return None
    return (
        f"this machine has {size(memory)} of memory, and the build may need {size(needed.ram_peak)}; a"
        " smaller --index (ivf-sq8, ivf-pq) needs less, and so does a build without --bm25"
    )

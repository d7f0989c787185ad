"""Vector index with FAISS, searched by inner product.

On the CPU an index is memory-mapped: opening reads nothing, and only pages that searches touch use memory.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from tidegate.errors import ConfigError, CorpusError
from tidegate.rag.files import replace_file
from tidegate.rag.index.gpu import MAX_K, on_gpus
from tidegate.rag.index.index_types import IndexKind, factory, training_rows
from tidegate.rag.index.vectors import Vectors
from tidegate.rag.progress import BuildProgress

if TYPE_CHECKING:
    import faiss

FILE = "vectors.faiss"
_SEED = 0
_BLAS_FROM = 3
"""Minimum number of queries in a search for which a matrix product is faster than one scan per query.

One thread, 50,000 × 384, Flat and mapped: milliseconds of CPU for scans and for BLAS, best of 3:
1 query 5.6 and 13.4, 2: 11.1 and 13.2, 3: 16.4 and 14.6, 4: 21.3 and 12.9, 8: 32.4 and 14.7.
"""


class VectorIndex:
    """FAISS index; thread-safe."""

    def __init__(self, index: faiss.Index, threads: int, *, gpu: bool = False) -> None:
        self._index = index
        self._threads = threads
        # FAISS' GPU indexes are not thread-safe.
        self._lock = threading.Lock() if gpu else contextlib.nullcontext()
        self._max_k = min(self.count, MAX_K) if gpu else self.count

    @classmethod
    def open(cls, directory: Path, kind: IndexKind, nprobe: int | None, threads: int) -> Self:
        """Maps the index, or shards it over the GPUs. `nprobe` is the number of inverted lists to search.

        Raises CorpusError if the file is not an index.
        """
        faiss = require_faiss()
        mapped = faiss.IO_FLAG_MMAP if kind.startswith("ivf") else faiss.IO_FLAG_MMAP_IFC
        try:
            index = faiss.read_index(str(directory / FILE), mapped)
        except RuntimeError as error:
            raise CorpusError(f"{directory / FILE} cannot be read; build the index again: {error}") from None
        if nprobe is not None:
            faiss.extract_index_ivf(index).nprobe = nprobe
        _use_blas(faiss, int(index.d))
        sharded = on_gpus(faiss, index, kind)
        return cls(index, threads) if sharded is None else cls(sharded, threads, gpu=True)

    @property
    def count(self) -> int:
        return int(self._index.ntotal)

    @property
    def dimension(self) -> int:
        return int(self._index.d)

    def search(
        self, queries: npt.NDArray[np.float32], k: int
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """Returns scores and rows, both [n, k], best first; missing rows are −1."""
        faiss = require_faiss()
        # OpenMP stores the number of threads per calling thread.
        faiss.omp_set_num_threads(self._threads)
        with self._lock:
            scores, rows = self._index.search(np.ascontiguousarray(queries), min(k, self._max_k))
        return scores, rows


def build_index(
    kind: IndexKind, vectors: Vectors, directory: Path, threads: int, progress: BuildProgress
) -> None:
    """Trains the index on a sample if necessary, adds all shards and writes the index."""
    faiss = require_faiss()
    faiss.omp_set_num_threads(threads)
    _use_blas(faiss, vectors.dimension)
    name = factory(kind, vectors.count, vectors.dimension)
    index = faiss.index_factory(vectors.dimension, name, faiss.METRIC_INNER_PRODUCT)
    sample_size = training_rows(kind, vectors.count)
    if sample_size:
        progress.print(f"training {name} on {sample_size:,} vectors")
        index.train(vectors.sample(sample_size, _SEED))
    on_progress = progress.stage("indexed")
    for shard in vectors.shards():
        index.add(np.ascontiguousarray(shard))
        on_progress(int(index.ntotal), vectors.count)
    replace_file(directory / FILE, lambda path: faiss.write_index(index, str(path)))


def _use_blas(faiss: ModuleType, dimension: int) -> None:
    """Makes FAISS use matrix products for batches, in the whole process.

    FAISS 1.15.1 does so from 128,000 numbers (queries × dimension), which is 334 queries of dimension 384 and
    too high for our batches. Earlier versions count queries and do so from 20 queries.
    """
    counts_numbers = _default_threshold(faiss) > 1000
    faiss.cvar.distance_compute_blas_threshold = _BLAS_FROM * dimension if counts_numbers else _BLAS_FROM


@functools.cache
def _default_threshold(faiss: ModuleType) -> int:
    return int(faiss.cvar.distance_compute_blas_threshold)


def require_faiss() -> ModuleType:
    """Imports FAISS. Raises ConfigError, which explains how to install it."""
    try:
        import faiss
    except ImportError:
        raise ConfigError("a vector index needs FAISS: pip install 'tidegate[rag]'") from None
    return faiss

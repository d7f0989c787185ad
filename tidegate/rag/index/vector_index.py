"""Vector index with FAISS, searched by inner product.

On the CPU an index is memory-mapped: opening reads nothing, and only pages that searches touch use memory.
Inverted lists are in a file of their own. They are built in blocks, so that the build holds one block in
memory, not the index.
If `faiss-gpu` is installed and finds GPUs, the index is sharded over them. This is untested: no GPU was
available.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tidegate.errors import ConfigError, CorpusError
from tidegate.failpoints import reach
from tidegate.program import advise_extra
from tidegate.progress import Progress
from tidegate.rag.files import replace_file, sync
from tidegate.rag.index.index_types import IndexKind, code_bytes, factory, training_rows
from tidegate.rag.index.vectors import Vectors

if TYPE_CHECKING:
    from faiss import Index, IndexIVF

FILE = "vectors.faiss"
LISTS = "vectors.lists"
"""File of the inverted lists; `FILE` then has the centroids and the code's parameters."""
BLOCK_BYTES = 256 << 20
"""Maximum bytes of the codes that a build of inverted lists holds in memory."""
MAX_K_ON_GPU = 2048
_SEED = 0
_BLAS_FROM = 3
"""Minimum number of queries in a search for which a matrix product is faster than one scan per query.

One thread, 50,000 × 384, Flat and mapped: milliseconds of CPU for scans and for BLAS, best of 3:
1 query 5.6 and 13.4, 2: 11.1 and 13.2, 3: 16.4 and 14.6, 4: 21.3 and 12.9, 8: 32.4 and 14.7.
"""


log = logging.getLogger("tidegate.rag")


class VectorIndex:
    """FAISS index; thread-safe. `nprobe` is the number of inverted lists to search.

    Raises CorpusError if the file is not an index.
    """

    def __init__(self, directory: Path, kind: IndexKind, nprobe: int | None, threads: int) -> None:
        faiss = require_faiss()
        try:
            index = _read(faiss, directory, kind)
        except RuntimeError as error:
            raise CorpusError(f"{directory / FILE} cannot be read; build the index again: {error}") from None
        if nprobe is not None:
            faiss.extract_index_ivf(index).nprobe = nprobe
        _use_blas(faiss, int(index.d))
        sharded = on_gpus(faiss, index, kind)
        self._index = index if sharded is None else sharded
        self._threads = threads
        # FAISS' GPU indexes are not thread-safe.
        self._lock = contextlib.nullcontext() if sharded is None else threading.Lock()
        self._max_k = self.count if sharded is None else min(self.count, MAX_K_ON_GPU)

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


def _read(faiss: ModuleType, directory: Path, kind: IndexKind) -> Index:
    """Opens the index, memory-mapped."""
    inverted = kind.startswith("ivf")
    flags = faiss.IO_FLAG_SKIP_IVF_DATA | faiss.IO_FLAG_READ_ONLY if inverted else faiss.IO_FLAG_MMAP_IFC
    index: Index = faiss.read_index(str(directory / FILE), flags)
    if not inverted:
        return index
    lists = faiss.downcast_InvertedLists(faiss.extract_index_ivf(index).invlists)
    lists.filename = str(directory / LISTS)  # the path in FILE is that of the build
    lists.do_mmap()
    # By default each search starts up to 32 threads that read lists ahead; they take longer than the search.
    lists.prefetch_nthread = 0
    return index


def files(kind: IndexKind) -> tuple[str, ...]:
    """Returns the names of the files of an index of this type."""
    return (FILE, LISTS) if kind.startswith("ivf") else (FILE,)


def build_index(kind: IndexKind, vectors: Vectors, directory: Path, threads: int, progress: Progress) -> None:
    """Trains the index on a sample if necessary, adds all shards and writes the index.

    Memory: the sample, and the codes: of one block with inverted lists, else of all vectors.
    """
    faiss = require_faiss()
    faiss.omp_set_num_threads(threads)
    _use_blas(faiss, vectors.dimension)
    name = factory(kind, vectors.count, vectors.dimension)
    index = faiss.index_factory(vectors.dimension, name, faiss.METRIC_INNER_PRODUCT)
    sample_size = training_rows(kind, vectors.count)
    if sample_size:
        progress.print(f"training {name} on {sample_size:,} vectors")
        index.train(vectors.sample(sample_size, _SEED))
    if kind.startswith("ivf"):
        _build_lists(faiss, index, kind, vectors, directory, progress)
        return
    on_progress = progress.stage("indexed")
    for shard in vectors.shards():
        index.add(np.ascontiguousarray(shard))
        on_progress(int(index.ntotal), vectors.count)
    replace_file(directory / FILE, lambda path: faiss.write_index(index, str(path)))


def _build_lists(
    faiss: ModuleType, index: IndexIVF, kind: IndexKind, vectors: Vectors, directory: Path, progress: Progress
) -> None:
    """Writes the inverted lists of all vectors in blocks, merges them, and writes the index."""
    on_progress = progress.stage("indexed")
    limit = BLOCK_BYTES // code_bytes(kind, vectors.dimension)
    blocks: list[Path] = []
    done = 0
    for shard in vectors.shards():
        index.add_with_ids(np.ascontiguousarray(shard), np.arange(done, done + len(shard)))
        done += len(shard)
        if index.ntotal >= limit or done == vectors.count:
            blocks.append(vectors.directory / f"block{len(blocks):04d}.faiss")
            faiss.write_index(index, str(blocks[-1]))
            index.reset()
        on_progress(done, vectors.count)
    _merge(faiss, index, blocks, directory / LISTS)
    reach("rag.lists")
    replace_file(directory / FILE, lambda path: faiss.write_index(index, str(path)))
    for block in blocks:
        block.unlink()


def _merge(faiss: ModuleType, index: IndexIVF, blocks: Sequence[Path], path: Path) -> None:
    """Copies the lists of all blocks, which are memory-mapped, to one file, and gives them to `index`."""
    path.unlink(missing_ok=True)
    parts = [faiss.read_index(str(block), faiss.IO_FLAG_MMAP) for block in blocks]
    pointers = faiss.InvertedListsPtrVector()
    for part in parts:
        pointers.push_back(part.invlists)
    lists = faiss.OnDiskInvertedLists(index.nlist, index.code_size, str(path))
    index.ntotal = lists.merge_from_multiple(pointers.data(), len(parts))
    index.replace_invlists(lists, True)
    lists.this.disown()
    sync(path)


def on_gpus(library: ModuleType, index: Index, kind: IndexKind) -> Index | None:
    """Shards the index over all visible GPUs, in float16; returns None if it stays on the CPU.

    FAISS' cloner copies each GPU's rows from the memory-mapped index, so that the host holds at most one
    shard. Every GPU has all inverted lists of an IVF index with a part of the vectors.
    """
    # `faiss-cpu` has this function, which returns 0, but not the options below.
    count = int(library.get_num_gpus())
    if count == 0:
        return None
    if kind == "sq8":
        log.warning(
            "FAISS does not support sq8 on GPUs: the index stays on the CPU; use flat or ivf-sq8 for GPUs"
        )
        return None
    options = library.GpuMultipleClonerOptions()
    options.shard = True
    options.useFloat16 = True
    log.info("sharding the index over %d GPUs", count)
    sharded: Index = library.index_cpu_to_all_gpus(index, co=options)
    return sharded


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
        raise ConfigError(f"a vector index needs FAISS: {advise_extra('rag')}") from None
    return faiss

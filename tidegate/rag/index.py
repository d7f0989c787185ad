"""The vector index: FAISS, searched by inner product."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from tidegate.errors import ConfigError, CorpusError
from tidegate.rag.files import replace_file
from tidegate.rag.manifest import IndexEntry
from tidegate.rag.vectors import Vectors

if TYPE_CHECKING:
    import faiss

FILE = "vectors.faiss"


class VectorIndex:
    """Finds the rows whose vectors are nearest. May be shared by threads."""

    def __init__(self, index: faiss.Index, threads: int) -> None:
        self._index = index
        self._threads = threads

    @classmethod
    def open(cls, directory: Path, entry: IndexEntry, threads: int) -> Self:
        """Raises CorpusError where the file is no index."""
        faiss = require_faiss()
        try:
            index = faiss.read_index(str(directory / FILE), faiss.IO_FLAG_MMAP_IFC)
        except RuntimeError as error:
            raise CorpusError(f"{directory / FILE} cannot be read; build the index again: {error}") from None
        return cls(index, threads)

    @property
    def count(self) -> int:
        return int(self._index.ntotal)

    @property
    def dimension(self) -> int:
        return int(self._index.d)

    def search(
        self, queries: npt.NDArray[np.float32], k: int
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """Scores and rows, [n, k], best first; where fewer were found, the row is −1."""
        faiss = require_faiss()
        # OpenMP keeps the number of threads for each calling thread.
        faiss.omp_set_num_threads(self._threads)
        scores, rows = self._index.search(np.ascontiguousarray(queries), min(k, self.count))
        return scores, rows


def build_index(vectors: Vectors, directory: Path, threads: int) -> IndexEntry:
    """Write the index of these vectors."""
    faiss = require_faiss()
    faiss.omp_set_num_threads(threads)
    index = faiss.IndexFlatIP(vectors.dimension)
    for shard in vectors.shards():
        index.add(np.ascontiguousarray(shard))
    replace_file(directory / FILE, lambda path: faiss.write_index(index, str(path)))
    return IndexEntry(kind="flat")


def require_faiss() -> ModuleType:
    """FAISS, or a ConfigError that says how to install it."""
    try:
        import faiss
    except ImportError:
        raise ConfigError("a vector index needs FAISS: pip install 'tidegate[rag]'") from None
    return faiss

"""The vectors of a corpus during a build, one file per shard; a build resumes after its last shard."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tidegate.errors import CorpusError
from tidegate.failpoints import reach
from tidegate.progress import OnProgress
from tidegate.rag.corpus.corpus import Corpus
from tidegate.rag.encoders import Encoder
from tidegate.rag.files import replace_array


class Vectors:
    """Vectors [n, dimension], float32, in shards of `shard` rows; the last may be shorter."""

    def __init__(self, directory: Path, count: int, dimension: int, shard: int) -> None:
        self.directory = directory
        self.count = count
        self.dimension = dimension
        self.shard = shard

    def shards(self) -> Iterator[npt.NDArray[np.float32]]:
        """Yields the memory-mapped vectors of each shard, [rows, dimension]."""
        for start in range(0, self.count, self.shard):
            yield np.load(self._path(start), mmap_mode="r")

    def sample(self, count: int, seed: int) -> npt.NDArray[np.float32]:
        """Returns a random sample of vectors, [count, dimension], which depends only on the seed."""
        chosen = np.random.default_rng(seed).choice(self.count, count, replace=False)
        return self._rows(np.sort(chosen))

    def _rows(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Returns the vectors of these rows, which must ascend: [len(rows), dimension]."""
        vectors = np.empty((len(rows), self.dimension), np.float32)
        for start in range(0, self.count, self.shard):
            first, end = np.searchsorted(rows, (start, start + self.shard))
            if first < end:
                vectors[first:end] = np.load(self._path(start), mmap_mode="r")[rows[first:end] - start]
        return vectors

    def encode(self, corpus: Corpus, encoder: Encoder, progress: OnProgress) -> None:
        """Encodes the missing shards. Raises CorpusError if the encoder returns invalid vectors."""
        self.directory.mkdir(exist_ok=True)
        for start in range(0, self.count, self.shard):
            end = min(start + self.shard, self.count)
            if not self._path(start).is_file():
                vectors = encoder.passages([corpus[row].passage() for row in range(start, end)])
                self._check(vectors, corpus, start, end, encoder.name)
                replace_array(self._path(start), vectors)
                reach("rag.vectors")
            progress(end, self.count)

    def _check(
        self, vectors: npt.NDArray[np.float32], corpus: Corpus, start: int, end: int, name: str
    ) -> None:
        if vectors.shape != (end - start, self.dimension):
            raise CorpusError(
                f"the encoder {name} returned vectors of shape {vectors.shape} for {end - start} documents of"
                f" dimension {self.dimension}"
            )
        bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
        if len(bad):
            raise CorpusError(
                f"the encoder {name} returned no finite vector for {len(bad)} documents, the first of them"
                f" {corpus[start + int(bad[0])].id!r}; a model in float16 may overflow: use float32"
            )

    def _path(self, start: int) -> Path:
        return self.directory / f"{start // self.shard:06d}.npy"

"""Measures the recall of an index and chooses its nprobe."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from tidegate.progress import Progress
from tidegate.rag.corpus.corpus import Corpus
from tidegate.rag.encoders import Encoder
from tidegate.rag.index.index_types import IndexKind, nlist
from tidegate.rag.index.vector_index import VectorIndex, require_faiss
from tidegate.rag.index.vectors import Vectors

K = 10
_QUERIES = 256
_WORDS = 12
_SEED = 1
_FIRST_NPROBE = 8
_MIN_GAIN = 0.005
"""Minimum gain in recall for which nprobe is doubled."""


def measure(
    kind: IndexKind, corpus: Corpus, vectors: Vectors, encoder: Encoder, directory: Path, threads: int,
    progress: Progress,
) -> tuple[int | None, float]:  # fmt: skip
    """Returns nprobe (None without inverted lists) and recall@10, with excerpts of passages as queries.

    nprobe is doubled until recall grows by less than half a percent.
    """
    queries = encoder.queries(_sample_queries(corpus))
    exact = _nearest(vectors, queries, min(K, vectors.count), threads)

    def recall_at(nprobe: int | None) -> float:
        _, rows = VectorIndex(directory, kind, nprobe, threads).search(queries, exact.shape[1])
        pairs = zip(rows.tolist(), exact.tolist(), strict=True)
        return sum(len(set(result) & set(truth)) for result, truth in pairs) / exact.size

    if not kind.startswith("ivf"):
        return None, recall_at(None)
    limit = nlist(vectors.count)
    nprobe = min(_FIRST_NPROBE, limit)
    recall = recall_at(nprobe)
    while nprobe < limit:
        more = recall_at(2 * nprobe)
        progress.print(
            f"recall@{K}: {recall:.3f} with nprobe {nprobe} of {limit}, {more:.3f} with {2 * nprobe}"
        )
        if more - recall < _MIN_GAIN:
            break
        nprobe, recall = 2 * nprobe, more
    return nprobe, recall


def _sample_queries(corpus: Corpus) -> list[str]:
    """Returns excerpts of twelve words from passages, the same for the same corpus."""
    rng = np.random.default_rng(_SEED)
    queries = []
    for row in rng.choice(len(corpus), min(_QUERIES, len(corpus)), replace=False).tolist():
        passage = corpus[row].passage().split()
        start = int(rng.integers(max(1, len(passage) - _WORDS + 1)))
        queries.append(" ".join(passage[start : start + _WORDS]))
    return queries


def _nearest(
    vectors: Vectors, queries: npt.NDArray[np.float32], k: int, threads: int
) -> npt.NDArray[np.int64]:
    """Returns the rows of the k nearest vectors by exact search, [queries, k]."""
    faiss = require_faiss()
    faiss.omp_set_num_threads(threads)
    best = faiss.ResultHeap(len(queries), k, keep_max=True)
    start = 0
    for shard in vectors.shards():
        scores, rows = faiss.knn(
            queries, np.ascontiguousarray(shard), min(k, len(shard)), faiss.METRIC_INNER_PRODUCT
        )
        best.add_result(scores, rows + start)
        start += len(shard)
    best.finalize()
    return np.asarray(best.I)

"""Measures the recall of an index and chooses its nprobe."""

from __future__ import annotations

from collections.abc import Callable
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
TARGET = 0.95
"""Default target of recall@10, which nprobe is chosen to reach."""
_MIN_GAIN = 0.005
"""Minimum gain in recall for which nprobe is doubled again."""
_STOP_FROM = 8
"""Smallest nprobe at which a smaller gain ends the search; below it, recall may still rise."""


def measure(
    kind: IndexKind, corpus: Corpus, vectors: Vectors, encoder: Encoder, directory: Path, threads: int,
    target: float, progress: Progress,
) -> tuple[int | None, float]:  # fmt: skip
    """Returns nprobe (None without inverted lists) and recall@10, with excerpts of passages as queries."""
    queries = encoder.queries(_sample_queries(corpus))
    exact = _nearest(vectors, queries, min(K, vectors.count), threads)

    def recall_at(nprobe: int | None) -> float:
        _, rows = VectorIndex(directory, kind, nprobe, threads).search(queries, exact.shape[1])
        pairs = zip(rows.tolist(), exact.tolist(), strict=True)
        return sum(len(set(result) & set(truth)) for result, truth in pairs) / exact.size

    if not kind.startswith("ivf"):
        return None, recall_at(None)
    return choose_nprobe(recall_at, nlist(vectors.count), target, progress)


def choose_nprobe(
    recall_at: Callable[[int], float], limit: int, target: float, progress: Progress
) -> tuple[int, float]:
    """Returns the smallest nprobe, to an eighth, whose recall reaches the target, and that recall.

    nprobe is doubled, up to `limit`, and then reduced by bisection. If doubling gains less than half a
    percent, the target is beyond what the codes can reach, and the smaller nprobe is returned.
    """
    too_few, nprobe, recall = 0, 1, recall_at(1)
    while recall < target and nprobe < limit:
        wider = min(2 * nprobe, limit)
        more = recall_at(wider)
        progress.print(f"recall@{K}: {recall:.3f} with nprobe {nprobe} of {limit}, {more:.3f} with {wider}")
        if more - recall < _MIN_GAIN and nprobe >= _STOP_FROM:
            return nprobe, recall
        too_few, nprobe, recall = nprobe, wider, more
    while recall >= target and nprobe - too_few > max(1, nprobe // 8):
        middle = (too_few + nprobe) // 2
        less = recall_at(middle)
        if less >= target:
            nprobe, recall = middle, less
        else:
            too_few = middle
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

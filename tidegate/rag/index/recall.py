"""How many of the truly nearest passages an index finds, and how many cells it must look at for that."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from tidegate.rag.corpus.corpus import Corpus
from tidegate.rag.encoders.encoder import Encoder
from tidegate.rag.index.index_types import IndexKind, cells
from tidegate.rag.index.vector_index import VectorIndex, require_faiss
from tidegate.rag.index.vectors import Vectors
from tidegate.rag.progress import BuildProgress

K = 10
QUERIES = 256
_WORDS = 12
_SEED = 1
_FIRST_NPROBE = 8
_WORTH = 0.005
"""Recall that doubling the cells looked at must bring to be worth the time."""


def measure(
    kind: IndexKind, corpus: Corpus, vectors: Vectors, encoder: Encoder, directory: Path, threads: int,
    news: BuildProgress,
) -> tuple[int | None, float]:  # fmt: skip
    """nprobe (None without cells) and recall@10 with it, over queries that are pieces of passages.

    Cells looked at are doubled until that finds less than half a percent more.
    """
    queries = encoder.queries(sample_queries(corpus))
    exact = nearest(vectors, queries, min(K, vectors.count), threads)

    def recall_at(nprobe: int | None) -> float:
        _, rows = VectorIndex.open(directory, kind, nprobe, threads).search(queries, exact.shape[1])
        pairs = zip(rows.tolist(), exact.tolist(), strict=True)
        return sum(len(set(found) & set(truth)) for found, truth in pairs) / exact.size

    if not kind.startswith("ivf"):
        return None, recall_at(None)
    limit = cells(vectors.count)
    nprobe = min(_FIRST_NPROBE, limit)
    recall = recall_at(nprobe)
    while nprobe < limit:
        more = recall_at(2 * nprobe)
        news.say(f"recall@{K}: {recall:.3f} looking at {nprobe} of {limit} cells, {more:.3f} at {2 * nprobe}")
        if more - recall < _WORTH:
            break
        nprobe, recall = 2 * nprobe, more
    return nprobe, recall


def sample_queries(corpus: Corpus, count: int = QUERIES) -> list[str]:
    """Runs of twelve words out of passages, the same for the same corpus."""
    chance = np.random.default_rng(_SEED)
    queries = []
    for row in chance.choice(len(corpus), min(count, len(corpus)), replace=False).tolist():
        spoken = corpus[row].passage().split()
        start = int(chance.integers(max(1, len(spoken) - _WORDS + 1)))
        queries.append(" ".join(spoken[start : start + _WORDS]))
    return queries


def nearest(
    vectors: Vectors, queries: npt.NDArray[np.float32], k: int, threads: int
) -> npt.NDArray[np.int64]:
    """The rows of the k nearest by comparison with every vector, a shard at a time: [queries, k]."""
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

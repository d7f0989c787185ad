"""Opens and searches an index."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tidegate.errors import ConfigError, CorpusError
from tidegate.rag.client import SearchResult
from tidegate.rag.corpus.corpus import Corpus, Document
from tidegate.rag.encoders import Encoder, load_encoder
from tidegate.rag.index.bm25 import Bm25
from tidegate.rag.index.manifest import Manifest
from tidegate.rag.index.vector_index import VectorIndex

Ranking = Sequence[tuple[int, float]]
"""(row, score), best first."""
FUSION_OFFSET = 60
"""Constant of reciprocal rank fusion (Cormack, Clarke and Büttcher, 2009); larger: flatter weights."""
FUSION_DEPTH = 100
"""Minimum depth of each ranking that is fused."""


@dataclass(frozen=True, slots=True)
class Dense:
    """Dense retrieval: the nearest vectors."""

    encoder: Encoder
    index: VectorIndex

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        """Returns at most k rows per query; FAISS pads missing ones with row −1."""
        vectors = self.encoder.queries(queries)
        scores, rows = self.index.search(vectors, k)
        # A zero vector is equally near to all documents.
        nonzero = np.any(vectors != 0.0, axis=1)
        results = zip(nonzero.tolist(), rows.tolist(), scores.tolist(), strict=True)
        return [
            [(row, score) for row, score in zip(*ranking, strict=True) if row >= 0] if valid else []
            for valid, *ranking in results
        ]


class Searcher:
    """An index built by `tidegate rag build`; thread-safe.

    `threads` is the number of threads of one search, for torch and FAISS each. `encoder` replaces the one in
    the manifest (for a model that was moved) and must produce the same vectors.
    Raises CorpusError if files, manifest and encoder do not match, ConfigError if a required package is
    missing.
    """

    def __init__(
        self, directory: Path, *, threads: int, device: str = "cpu", encoder: Encoder | str | None = None
    ) -> None:
        manifest = self.manifest = Manifest.read(directory)
        manifest.check_files(directory)
        inside = directory / manifest.generation
        self.corpus = Corpus(inside)
        self._bm25 = Bm25(inside, threads) if manifest.bm25 else None
        self._dense = _dense(manifest, inside, threads, device, encoder)
        counts = {"documents": len(self.corpus)}
        counts |= {"vectors": self._dense.index.count} if self._dense else {}
        counts |= {"documents with BM25": self._bm25.count} if self._bm25 else {}
        if any(count != manifest.documents for count in counts.values()):
            raise CorpusError(
                f"{directory}: the manifest has {manifest.documents:,} documents, but the files hold"
                f" {', '.join(f'{count:,} {what}' for what, count in counts.items())}: build the index again"
            )

    @property
    def modes(self) -> Sequence[str]:
        """Search modes of this index; the first is the default."""
        return self.manifest.modes

    @property
    def info(self) -> dict[str, Any]:
        """The index as a JSON object: documents, modes, encoder, and type and recall of the vector index."""
        manifest = self.manifest
        return {
            "generation": manifest.generation,
            "documents": len(self),
            "modes": self.modes,
            "encoder": None if manifest.encoder is None else manifest.encoder.name,
            "index": None if manifest.index is None else manifest.index.model_dump(mode="json"),
            "warning": None if manifest.index is None else manifest.index.warning,
        }

    def __len__(self) -> int:
        return len(self.corpus)

    def search(
        self, queries: Sequence[str], ks: Sequence[int], mode: str | None = None
    ) -> list[list[SearchResult]]:
        """Returns at most `ks[i]` documents for `queries[i]`, best first.

        With BM25 only documents that share a word with the query are returned, and none for a query without
        words. Raises ConfigError for a mode that the index does not have, ValueError for a negative k.
        """
        if any(k < 0 for k in ks):
            raise ValueError(f"k = {min(ks)} is less than 0")
        mode = self.modes[0] if mode is None else mode
        if mode not in self.modes:
            raise ConfigError(f"this index has no mode {mode!r}; it has {', '.join(self.modes)}")
        ks = [min(k, len(self)) for k in ks]
        if not any(ks):
            return [[] for _ in queries]
        return [self._results(ranking) for ranking in self._rankings(queries, ks, mode)]

    def find(self, id: str) -> Document | None:
        row = self.corpus.row(id)
        return None if row is None else self.corpus[row]

    def _rankings(self, queries: Sequence[str], ks: Sequence[int], mode: str) -> list[Ranking]:
        """Returns the k best rows of each query.

        Queries with the same depth are searched together. The depth affects ties and the overlap of two
        rankings, so it must not depend on other queries in the batch.
        """
        depths = [max(k, FUSION_DEPTH) for k in ks] if mode == "hybrid" else ks
        results: dict[int, Ranking] = {}
        for depth in set(depths):
            indices = [index for index, other in enumerate(depths) if other == depth]
            lists = [
                part.search([queries[index] for index in indices], depth)
                for name, part in (("dense", self._dense), ("bm25", self._bm25))
                if part is not None and mode in (name, "hybrid")
            ]
            for index, rankings in zip(indices, zip(*lists, strict=True), strict=True):
                results[index] = rankings[0] if mode != "hybrid" else _fuse(rankings, ks[index])
        return [results[index] for index in range(len(queries))]

    def _results(self, ranking: Ranking) -> list[SearchResult]:
        results = []
        for row, score in ranking:
            document = self.corpus[row]
            results.append(SearchResult(document.id, document.title, document.text, score))
        return results


def _dense(
    manifest: Manifest, inside: Path, threads: int, device: str, encoder: Encoder | str | None
) -> Dense | None:
    if manifest.index is None or manifest.encoder is None:
        return None
    entry = manifest.encoder
    if encoder is None or isinstance(encoder, str):
        encoder = load_encoder(encoder or entry.name, threads=threads, device=device, prefixes=entry.prefixes)
    entry.check(encoder, inside)
    index = VectorIndex(inside, manifest.index.kind, manifest.index.nprobe, threads)
    if index.dimension != entry.dimension:
        raise CorpusError(
            f"{inside}: the index has dimension {index.dimension}, not {entry.dimension}; build it again"
        )
    return Dense(encoder, index)


def _fuse(rankings: Iterable[Ranking], k: int) -> Ranking:
    """Combines rankings by reciprocal rank fusion: the k best rows by the sum of 1 ÷ (FUSION_OFFSET + rank).

    Equal sums are ordered by row, so that results are deterministic.
    """
    sums: dict[int, float] = defaultdict(float)
    for ranking in rankings:
        for rank, (row, _) in enumerate(ranking, 1):
            sums[row] += 1.0 / (FUSION_OFFSET + rank)
    return sorted(sums.items(), key=lambda item: (-item[1], item[0]))[:k]

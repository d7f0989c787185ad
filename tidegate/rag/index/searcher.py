"""Opens and searches an index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from tidegate.errors import ConfigError, CorpusError
from tidegate.rag.corpus.corpus import Corpus, Document
from tidegate.rag.encoders import Encoder, EncoderPrefixes, load_encoder
from tidegate.rag.index.bm25 import Bm25
from tidegate.rag.index.encoder_check import check_encoder
from tidegate.rag.index.fusion import DEPTH, Ranking, fuse
from tidegate.rag.index.manifest import Manifest
from tidegate.rag.index.vector_index import VectorIndex


class Hit(NamedTuple):
    """A document found by a search. Scores are comparable within one result only."""

    id: str
    row: int
    score: float


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
    """An opened index; thread-safe."""

    def __init__(self, manifest: Manifest, corpus: Corpus, dense: Dense | None, bm25: Bm25 | None) -> None:
        self.manifest = manifest
        self.corpus = corpus
        self._dense = dense
        self._bm25 = bm25

    @classmethod
    def open(
        cls, directory: Path, *, threads: int, device: str = "cpu", encoder: Encoder | str | None = None
    ) -> Self:
        """Opens an index built by `tidegate rag build`.

        `threads` is the number of threads of one search, for torch and FAISS each. `encoder` replaces the one
        in the manifest (for a model that was moved) and must produce the same vectors.
        Raises CorpusError if files, manifest and encoder do not match, ConfigError if a required package is
        missing.
        """
        manifest = Manifest.read(directory)
        manifest.check_files(directory)
        inside = directory / manifest.generation
        corpus = Corpus(inside)
        bm25 = Bm25.open(inside, threads) if manifest.bm25 else None
        dense = _dense(manifest, inside, threads, device, encoder)
        counts = {"documents": len(corpus)}
        counts |= {"vectors": dense.index.count} if dense else {}
        counts |= {"documents with BM25": bm25.count} if bm25 else {}
        if any(count != manifest.documents for count in counts.values()):
            raise CorpusError(
                f"{directory}: the manifest has {manifest.documents:,} documents, but the files hold"
                f" {', '.join(f'{count:,} {what}' for what, count in counts.items())}: build the index again"
            )
        return cls(manifest, corpus, dense, bm25)

    @property
    def modes(self) -> tuple[str, ...]:
        """Search modes of this index; the first is the default."""
        return self.manifest.modes

    def __len__(self) -> int:
        return len(self.corpus)

    def search(self, queries: Sequence[str], ks: Sequence[int], mode: str | None = None) -> list[list[Hit]]:
        """Returns at most `ks[i]` documents for `queries[i]`, best first.

        With BM25 only documents that share a word with the query are returned, and none for a query without
        words. Raises ConfigError for a mode that the index does not have, ValueError for a negative k.
        """
        if len(queries) != len(ks):
            raise ValueError(f"{len(queries)} queries and {len(ks)} ks")
        if any(k < 0 for k in ks):
            raise ValueError(f"k = {min(ks)} is less than 0")
        mode = self.modes[0] if mode is None else mode
        if mode not in self.modes:
            raise ConfigError(f"this index has no mode {mode!r}; it has {', '.join(self.modes)}")
        ks = [min(k, len(self)) for k in ks]
        if not any(ks):
            return [[] for _ in queries]
        return [self._hits(ranking) for ranking in self._rankings(queries, ks, mode)]

    def document(self, row: int) -> Document:
        """Returns a document. Raises IndexError for a row that does not exist."""
        return self.corpus[row]

    def find(self, id: str) -> Document | None:
        """Returns the document with this id, or None."""
        row = self.corpus.row(id)
        return None if row is None else self.corpus[row]

    def _rankings(self, queries: Sequence[str], ks: Sequence[int], mode: str) -> list[Ranking]:
        """Returns the k best rows of each query.

        Queries with the same depth are searched together. The depth affects ties and the overlap of two
        rankings, so it must not depend on other queries in the batch.
        """
        depths = [max(k, DEPTH) for k in ks] if mode == "hybrid" else ks
        results: dict[int, Ranking] = {}
        for depth in set(depths):
            indices = [index for index, other in enumerate(depths) if other == depth]
            lists = [
                part.search([queries[index] for index in indices], depth)
                for name, part in (("dense", self._dense), ("bm25", self._bm25))
                if part is not None and mode in (name, "hybrid")
            ]
            for index, rankings in zip(indices, zip(*lists, strict=True), strict=True):
                results[index] = rankings[0] if mode != "hybrid" else fuse(rankings, ks[index])
        return [results[index] for index in range(len(queries))]

    def _hits(self, ranking: Ranking) -> list[Hit]:
        return [Hit(self.corpus[row].id, row, score) for row, score in ranking]


def _dense(
    manifest: Manifest, inside: Path, threads: int, device: str, encoder: Encoder | str | None
) -> Dense | None:
    if manifest.index is None or manifest.encoder is None:
        return None
    entry = manifest.encoder
    if encoder is None or isinstance(encoder, str):
        prefixes = EncoderPrefixes(entry.query_prefix, entry.passage_prefix)
        encoder = load_encoder(encoder or entry.name, threads=threads, device=device, prefixes=prefixes)
    check_encoder(entry, encoder, inside)
    index = VectorIndex.open(inside, manifest.index.kind, manifest.index.nprobe, threads)
    if index.dimension != entry.dimension:
        raise CorpusError(
            f"{inside}: the index has dimension {index.dimension}, not {entry.dimension}; build it again"
        )
    return Dense(encoder, index)

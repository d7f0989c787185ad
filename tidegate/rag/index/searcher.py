"""Questions to passages: an index that was built, opened and asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from tidegate.errors import ConfigError, CorpusError
from tidegate.rag.corpus.corpus import Corpus, Document
from tidegate.rag.encoders.encoder import Encoder, load_encoder
from tidegate.rag.encoders.prefixes import EncoderPrefixes
from tidegate.rag.index.bm25 import Bm25
from tidegate.rag.index.encoder_check import check_encoder
from tidegate.rag.index.fusion import DEPTH, Ranking, fuse
from tidegate.rag.index.manifest import Manifest
from tidegate.rag.index.vector_index import VectorIndex


class Hit(NamedTuple):
    """A document that was found. Scores compare within one answer only."""

    id: str
    row: int
    score: float


@dataclass(frozen=True, slots=True)
class Dense:
    """Nearest vectors."""

    encoder: Encoder
    index: VectorIndex

    def search(self, queries: Sequence[str], k: int) -> list[Ranking]:
        """At most k rows a query; FAISS pads what it did not find with row −1."""
        vectors = self.encoder.queries(queries)
        scores, rows = self.index.search(vectors, k)
        # A vector of zeros is no nearer to one document than to another.
        asked = np.any(vectors != 0.0, axis=1)
        found = zip(asked.tolist(), rows.tolist(), scores.tolist(), strict=True)
        return [
            [(row, score) for row, score in zip(one, worth, strict=True) if row >= 0] if known else []
            for known, one, worth in found
        ]


class Searcher:
    """An opened index. Every method may be called from several threads at once."""

    def __init__(self, manifest: Manifest, corpus: Corpus, dense: Dense | None, bm25: Bm25 | None) -> None:
        self.manifest = manifest
        self.corpus = corpus
        self._dense = dense
        self._bm25 = bm25

    @classmethod
    def open(
        cls, directory: Path, *, threads: int, device: str = "cpu", encoder: Encoder | str | None = None
    ) -> Self:
        """Open what `tidegate rag build` wrote.

        `threads` are those of one search, of torch and of FAISS each. `encoder` is used in place of the one
        that the manifest names (a model that was moved); it must encode alike.
        Raises CorpusError where files, manifest and encoder do not belong together, ConfigError where what
        the index needs is not installed.
        """
        manifest = Manifest.read(directory)
        manifest.check_files(directory)
        inside = directory / manifest.generation
        corpus = Corpus.open(inside)
        bm25 = Bm25.open(inside, threads) if manifest.bm25 else None
        dense = _dense(manifest, inside, threads, device, encoder)
        counts = {"documents": len(corpus)}
        counts |= {"vectors": dense.index.count} if dense else {}
        counts |= {"documents with BM25": bm25.count} if bm25 else {}
        if any(count != manifest.documents for count in counts.values()):
            raise CorpusError(
                f"{directory} is of {manifest.documents:,} documents, but holds"
                f" {', '.join(f'{count:,} {what}' for what, count in counts.items())}: build the index again"
            )
        return cls(manifest, corpus, dense, bm25)

    @property
    def modes(self) -> tuple[str, ...]:
        """The ways in which this index can be searched; the first is the default."""
        return self.manifest.modes

    def __len__(self) -> int:
        return len(self.corpus)

    def search(self, queries: Sequence[str], ks: Sequence[int], mode: str | None = None) -> list[list[Hit]]:
        """At most `ks[i]` documents for `queries[i]`, best first.

        Fewer where the index holds fewer, and with BM25 where no more share a word with the query. A query
        without a word finds nothing. Raises ConfigError for a mode that the index was not built for,
        ValueError for a k below 0.
        """
        if len(queries) != len(ks):
            raise ValueError(f"{len(queries)} queries and {len(ks)} ks")
        if any(k < 0 for k in ks):
            raise ValueError(f"k = {min(ks)} is less than 0")
        mode = self.modes[0] if mode is None else mode
        if mode not in self.modes:
            raise ConfigError(f"this index has no mode {mode!r}; it was built for {', '.join(self.modes)}")
        wanted = [min(k, len(self)) for k in ks]
        if not any(wanted):
            return [[] for _ in queries]
        return [self._hits(one) for one in self._rankings(queries, wanted, mode)]

    def document(self, row: int) -> Document:
        """Raises IndexError for a row that there is not."""
        return self.corpus[row]

    def find(self, id: str) -> Document | None:
        """The document with this id."""
        row = self.corpus.row(id)
        return None if row is None else self.corpus[row]

    def _rankings(self, queries: Sequence[str], ks: Sequence[int], mode: str) -> list[Ranking]:
        """The k best of each query.

        What is looked into equally deep is one search: who is among equals, and what two rankings have in
        common, depends on the depth, and so must not depend on what is asked beside a query.
        """
        depths = [max(k, DEPTH) for k in ks] if mode == "hybrid" else ks
        found: dict[int, Ranking] = {}
        for depth in set(depths):
            places = [place for place, one in enumerate(depths) if one == depth]
            lists = [
                part.search([queries[place] for place in places], depth)
                for name, part in (("dense", self._dense), ("bm25", self._bm25))
                if part is not None and mode in (name, "hybrid")
            ]
            for place, rankings in zip(places, zip(*lists, strict=True), strict=True):
                found[place] = rankings[0] if mode != "hybrid" else fuse(rankings, ks[place])
        return [found[place] for place in range(len(queries))]

    def _hits(self, found: Ranking) -> list[Hit]:
        return [Hit(self.corpus[row].id, row, score) for row, score in found]


def _dense(
    manifest: Manifest, inside: Path, threads: int, device: str, encoder: Encoder | str | None
) -> Dense | None:
    if manifest.index is None or manifest.encoder is None:
        return None
    recorded = manifest.encoder
    if encoder is None or isinstance(encoder, str):
        prefixes = EncoderPrefixes(recorded.query_prefix, recorded.passage_prefix)
        encoder = load_encoder(encoder or recorded.name, threads=threads, device=device, prefixes=prefixes)
    check_encoder(recorded, encoder, inside)
    index = VectorIndex.open(inside, manifest.index.kind, manifest.index.nprobe, threads)
    if index.dimension != recorded.dimension:
        raise CorpusError(f"{inside}: the index has {index.dimension} numbers a vector; build it again")
    return Dense(encoder, index)

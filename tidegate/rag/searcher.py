"""Questions to passages: an index that was built, opened and asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from tidegate.errors import ConfigError, CorpusError
from tidegate.rag.corpus import Corpus, Document
from tidegate.rag.encode import Encoder, load_encoder
from tidegate.rag.index import VectorIndex
from tidegate.rag.manifest import EncoderEntry, Manifest


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

    def search(self, queries: Sequence[str], k: int) -> list[list[tuple[int, float]]]:
        """(row, score), best first, at most k a query."""
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

    def __init__(self, manifest: Manifest, corpus: Corpus, dense: Dense | None) -> None:
        self.manifest = manifest
        self.corpus = corpus
        self._dense = dense

    @classmethod
    def open(cls, directory: Path, *, threads: int, encoder: Encoder | None = None) -> Self:
        """Open what `tidegate rag build` wrote. `threads` are those of one search.

        `encoder` is used in place of the one that the manifest names; it must encode alike.
        Raises CorpusError where the files, the manifest and the encoder do not belong together.
        """
        manifest = Manifest.read(directory)
        inside = directory / manifest.generation
        corpus = Corpus.open(inside)
        dense = None
        if manifest.index is not None and manifest.encoder is not None:
            encoder = encoder or load_encoder(manifest.encoder.name, threads=threads)
            index = VectorIndex.open(inside, manifest.index, threads)
            _check(directory, manifest.encoder, encoder, index)
            dense = Dense(encoder, index)
        return cls(manifest, corpus, dense)

    @property
    def modes(self) -> tuple[str, ...]:
        """The ways in which this index can be searched; the first is the default."""
        return self.manifest.modes

    def __len__(self) -> int:
        return len(self.corpus)

    def search(self, queries: Sequence[str], ks: Sequence[int], mode: str | None = None) -> list[list[Hit]]:
        """At most `ks[i]` documents for `queries[i]`, best first.

        Fewer where the index holds fewer, or where nothing speaks for more. A query without a word finds
        nothing. Raises ConfigError for a mode that the index was not built for, ValueError for a k below 0.
        """
        if len(queries) != len(ks):
            raise ValueError(f"{len(queries)} queries and {len(ks)} ks")
        if any(k < 0 for k in ks):
            raise ValueError(f"k = {min(ks)} is less than 0")
        if mode is not None and mode not in self.modes:
            raise ConfigError(f"this index has no mode {mode!r}; it was built for {', '.join(self.modes)}")
        k = min(max(ks, default=0), len(self))
        if k == 0:
            return [[] for _ in queries]
        assert self._dense is not None
        found = self._dense.search(queries, k)
        return [self._hits(one[:k]) for one, k in zip(found, ks, strict=True)]

    def document(self, row: int) -> Document:
        """Raises IndexError for a row that there is not."""
        return self.corpus[row]

    def find(self, id: str) -> Document | None:
        """The document with this id."""
        row = self.corpus.row(id)
        return None if row is None else self.corpus[row]

    def _hits(self, found: Sequence[tuple[int, float]]) -> list[Hit]:
        return [Hit(self.corpus[row].id, row, score) for row, score in found]


def _check(directory: Path, recorded: EncoderEntry, encoder: Encoder, index: VectorIndex) -> None:
    if encoder.dimension != recorded.dimension or index.dimension != recorded.dimension:
        raise CorpusError(
            f"{directory} was built with vectors of {recorded.dimension} numbers, but the encoder"
            f" {encoder.name} gives {encoder.dimension} and the index holds {index.dimension}:"
            f" use the encoder {recorded.name}, or build the index again"
        )

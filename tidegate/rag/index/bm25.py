"""BM25 (Lucene's variant, k1 1.5, b 0.75) with bm25s, which computes scores when the index is built.

During the build the words of the documents are in a file, so that they are never all in memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Self

import numpy as np
import numpy.typing as npt

from tidegate.errors import ConfigError, CorpusError
from tidegate.failpoints import reach
from tidegate.program import advise_extra
from tidegate.progress import OnProgress
from tidegate.rag.corpus.corpus import Corpus
from tidegate.rag.encoders import STOP_WORDS, words
from tidegate.rag.files import sync

_NAMES = {
    "data_name": "bm25.data.npy",
    "indices_name": "bm25.indices.npy",
    "indptr_name": "bm25.indptr.npy",
    "vocab_name": "bm25.vocab.json",
    "params_name": "bm25.params.json",
}
FILES = tuple(_NAMES.values())
_SCRATCH = "words.int32"
_STEP = 4096


class Bm25:
    """BM25 index of documents, memory-mapped; thread-safe. Raises CorpusError if its files are invalid."""

    def __init__(self, directory: Path, threads: int) -> None:
        bm25s = require_bm25s()
        try:
            self._index = bm25s.BM25.load(directory, mmap=True, **_NAMES)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CorpusError(
                f"{directory}: the BM25 index cannot be read; build it again: {error}"
            ) from None
        self._threads = threads

    @property
    def count(self) -> int:
        """Number of documents."""
        return int(self._index.scores["num_docs"])

    def search(self, queries: Sequence[str], k: int) -> list[list[tuple[int, float]]]:
        """Returns (row, score), best first, at most k per query; only documents that share a word with it."""
        word_ids = [self._ids(query) for query in queries]
        nonempty = [ids for ids in word_ids if ids]
        if not nonempty:
            return [[] for _ in queries]
        rows, scores = self._index.retrieve(
            nonempty, k=min(k, self.count), show_progress=False, backend_selection="numpy",
            n_threads=self._threads if self._threads > 1 and len(nonempty) > 1 else 0,
        )  # fmt: skip
        rankings = iter(zip(rows.tolist(), scores.tolist(), strict=True))
        return [
            [hit for hit in zip(*next(rankings), strict=True) if hit[1] > 0.0] if ids else []
            for ids in word_ids
        ]

    def _ids(self, query: str) -> list[int]:
        vocabulary = self._index.vocab_dict
        return [vocabulary[word] for word in words(query) if word in vocabulary]


def build_bm25(corpus: Corpus, directory: Path, progress: OnProgress) -> None:
    """Builds the index of these documents if it is missing. Raises CorpusError if no document has a word."""
    bm25s = require_bm25s()
    scratch = directory / _SCRATCH
    # The scratch file is created first and removed last: without it the index files are complete.
    if all((directory / name).is_file() for name in FILES) and not scratch.exists():
        return
    tokens = _tokenise(corpus, scratch, progress)
    if not tokens.vocab:
        raise CorpusError("no document holds a word that BM25 indexes; build without --bm25")
    index = bm25s.BM25(k1=1.5, b=0.75, method="lucene", auto_compile=False)
    index.index(tokens, create_empty_token=False, show_progress=False)
    index.save(directory, show_progress=False, **_NAMES)
    for name in FILES:
        sync(directory / name)
    reach("rag.bm25")
    scratch.unlink()


class _Tokens:
    """Word ids of every document, read from the file; has `ids` and `vocab` like bm25s' `Tokenized`."""

    def __init__(self, path: Path, ends: npt.NDArray[np.int64], vocab: dict[str, int]) -> None:
        self._path = path
        self._ends = ends
        self.vocab = vocab

    @property
    def ids(self) -> Self:
        return self

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __iter__(self) -> Iterator[list[int]]:
        flat = np.memmap(self._path, np.int32, mode="r") if self._ends[-1] else np.empty(0, np.int32)
        for start, end in zip(self._ends[:-1].tolist(), self._ends[1:].tolist(), strict=True):
            yield flat[start:end].tolist()


def _tokenise(corpus: Corpus, path: Path, progress: OnProgress) -> _Tokens:
    vocabulary: dict[str, int] = {}
    ends = np.zeros(len(corpus) + 1, np.int64)
    with path.open("wb") as file:
        for row, document in enumerate(corpus):
            numbers = array("i")
            for word in words(document.passage()):
                if word not in STOP_WORDS:
                    numbers.append(vocabulary.setdefault(word, len(vocabulary)))
            numbers.tofile(file)
            ends[row + 1] = ends[row] + len(numbers)
            if (row + 1) % _STEP == 0 or row + 1 == len(corpus):
                progress(row + 1, len(corpus))
    return _Tokens(path, ends, vocabulary)


def require_bm25s() -> ModuleType:
    """Imports bm25s. Raises ConfigError, which explains how to install it."""
    try:
        import bm25s
    except ImportError:
        raise ConfigError(f"BM25 needs bm25s: {advise_extra('rag')}") from None
    return bm25s  # type: ignore[no-any-return]

"""BM25 (in Lucene's form, k1 1.5, b 0.75) by bm25s: scores computed when the index is built, then looked up.

The words of the documents lie in a file while the index is built, so that they are never all in memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from tidegate.errors import ConfigError, CorpusError
from tidegate.failpoints import reach
from tidegate.rag.corpus.corpus import Corpus
from tidegate.rag.encoders.words import COMMON, words
from tidegate.rag.files import sync
from tidegate.rag.progress import OnProgress

if TYPE_CHECKING:
    import bm25s

FILES = tuple(
    f"bm25.{part}" for part in ("data.npy", "indices.npy", "indptr.npy", "vocab.json", "params.json")
)
_NAMES = dict(
    zip(("data_name", "indices_name", "indptr_name", "vocab_name", "params_name"), FILES, strict=True)
)
_SCRATCH = "words.int32"
_STEP = 4096


class Bm25:
    """Finds documents by the words that they share with the query. May be shared by threads."""

    def __init__(self, index: bm25s.BM25, threads: int) -> None:
        self._index = index
        self._threads = threads

    @classmethod
    def open(cls, directory: Path, threads: int) -> Self:
        """Map the index. Raises CorpusError where its files are none."""
        bm25s = require_bm25s()
        try:
            index = bm25s.BM25.load(directory, mmap=True, **_NAMES)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CorpusError(
                f"{directory}: the BM25 index cannot be read; build it again: {error}"
            ) from None
        return cls(index, threads)

    @property
    def count(self) -> int:
        """Of documents."""
        return int(self._index.scores["num_docs"])

    def search(self, queries: Sequence[str], k: int) -> list[list[tuple[int, float]]]:
        """(row, score), best first, at most k a query; only documents that share a word with it."""
        known = [self._ids(query) for query in queries]
        asked = [ids for ids in known if ids]
        if not asked:
            return [[] for _ in queries]
        rows, scores = self._index.retrieve(
            asked, k=min(k, self.count), show_progress=False, backend_selection="numpy",
            n_threads=self._threads if self._threads > 1 and len(asked) > 1 else 0,
        )  # fmt: skip
        found = iter(zip(rows.tolist(), scores.tolist(), strict=True))
        return [_positive(*next(found)) if ids else [] for ids in known]

    def _ids(self, query: str) -> list[int]:
        vocabulary = self._index.vocab_dict
        return [vocabulary[word] for word in words(query) if word in vocabulary]


def build_bm25(corpus: Corpus, directory: Path, progress: OnProgress) -> None:
    """Write the index of these documents, unless it is there. Raises CorpusError where none holds a word."""
    bm25s = require_bm25s()
    scratch = directory / _SCRATCH
    # The scratch file is made first and removed last: without it the others are whole.
    if all((directory / name).is_file() for name in FILES) and not scratch.exists():
        return
    tokens = _tokenise(corpus, scratch, progress)
    if not tokens.vocab:
        raise CorpusError("no document holds a word that BM25 counts; build without --bm25")
    index = bm25s.BM25(k1=1.5, b=0.75, method="lucene", auto_compile=False)
    index.index(tokens, create_empty_token=False, show_progress=False)
    index.save(directory, show_progress=False, **_NAMES)
    for name in FILES:
        sync(directory / name)
    reach("rag.bm25")
    scratch.unlink()


class _Tokens:
    """Every document's word numbers, read from the file as often as bm25s asks: what it calls an object."""

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
                if word not in COMMON:
                    numbers.append(vocabulary.setdefault(word, len(vocabulary)))
            numbers.tofile(file)
            ends[row + 1] = ends[row] + len(numbers)
            if (row + 1) % _STEP == 0 or row + 1 == len(corpus):
                progress(row + 1, len(corpus))
    return _Tokens(path, ends, vocabulary)


def _positive(rows: Sequence[int], scores: Sequence[float]) -> list[tuple[int, float]]:
    return [(row, score) for row, score in zip(rows, scores, strict=True) if score > 0.0]


def require_bm25s() -> ModuleType:
    """bm25s, or a ConfigError that says how to install it."""
    try:
        import bm25s
    except ImportError:
        raise ConfigError("BM25 needs bm25s: pip install 'tidegate[rag]'") from None
    return bm25s  # type: ignore[no-any-return]

"""Synthetic documents and vectors of any number, made in blocks, and a server of their index.

    python -m retrieval.synthetic INDEX VECTORS DIMENSION ANNOUNCE

A vector is the sum of the centre of a random topic, one for 250 vectors, and of noise, normalised to length
1. Centres and noise are normal with the same variances, which fall as 1 ÷ the component's number, so that a
few components have most of the variance, as with vectors of texts. A query is a stored vector plus noise of a
quarter of that noise's variance. A document has 60 words, and its number is every tenth of them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tidegate.rag.encoders import EncoderPrefixes, Metric
from tidegate.rag.index.searcher import Searcher
from tidegate.rag.server.app import create_app
from tidegate.rag.server.service import RagOptions, Retrieval
from tidegate.service.serve import Listen, bind, run_app

BLOCK = 4096
PER_TOPIC = 250
QUERY_NOISE = 0.5
Matrix = npt.NDArray[np.float32]
_TEXT = ("harbour bridge market library tower garden station museum ferry {0} " * 6).strip()


class SyntheticEncoder:
    """Returns the vector of the number in a text."""

    name = "synthetic"
    metric: Metric = "cosine"
    prefixes = EncoderPrefixes()

    def __init__(self, vectors: int, dimension: int) -> None:
        self.dimension = dimension
        spectrum = np.arange(1, dimension + 1, dtype=np.float32) ** -0.5
        self._scale = spectrum / np.linalg.norm(spectrum)
        self._centres = self._normal([0], max(1, vectors // PER_TOPIC))

    def block(self, number: int) -> Matrix:
        """Returns the vectors number · BLOCK to (number + 1) · BLOCK − 1, [BLOCK, dimension]."""
        topics = np.random.default_rng([1, number]).integers(len(self._centres), size=BLOCK)
        return _unit(self._centres[topics] + self._normal([2, number], BLOCK))

    def passages(self, texts: Sequence[str]) -> Matrix:
        numbers = np.array([_number(text) for text in texts])
        vectors = np.repeat(_unit(self._normal([4], 1)), len(texts), axis=0)
        for block in np.unique(numbers[numbers >= 0] // BLOCK):
            inside = numbers // BLOCK == block
            vectors[inside] = self.block(int(block))[numbers[inside] % BLOCK]
        return vectors

    def queries(self, texts: Sequence[str]) -> Matrix:
        noise = [self._normal([3, _number(text) + 1], 1)[0] for text in texts]
        return _unit(self.passages(texts) + QUERY_NOISE * np.array(noise))

    def _normal(self, seed: list[int], count: int) -> Matrix:
        chance = np.random.default_rng(seed)
        return chance.standard_normal((count, self.dimension), np.float32) * self._scale


def write_corpus(path: Path, documents: int) -> None:
    """Writes JSONL; the documents are never all in memory."""
    with path.open("w") as file:
        for number in range(documents):
            file.write(f'{{"id":"d{number}","title":"","text":"{_TEXT.format(number)}"}}\n')


def query_of(number: int) -> str:
    """Returns the query whose nearest document is, before noise, the one of this number."""
    return f"which ferry {number}"


def _number(text: str) -> int:
    """The number in a text; −1 without one."""
    found = re.search(r"\d+", text)
    return -1 if found is None else int(found[0])


def _unit(vectors: Matrix) -> Matrix:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / lengths).astype(np.float32)


def main() -> None:
    directory, vectors, dimension, announce = sys.argv[1:]
    encoder = SyntheticEncoder(int(vectors), int(dimension))
    retrieval = Retrieval(
        RagOptions(Path(directory)), lambda path, options: Searcher(path, threads=1, encoder=encoder)
    )
    listen = Listen(announce=Path(announce))
    run_app(create_app(retrieval), bind(listen), listen)


if __name__ == "__main__":
    main()

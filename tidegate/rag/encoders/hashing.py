"""Encoder without a model: hashes words, pairs of words and parts of words into a vector.

For demos and tests. It finds passages that share words with the query and ignores meaning. Features are
hashed with a sign (Weinberger et al., 2009), so that collisions cancel on average.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from tidegate.rag.encoders.prefixes import EncoderPrefixes
from tidegate.rag.encoders.words import COMMON, words

DIMENSION = 2048
_PAIR, _PART = 0.5, 0.2
"""Weights of a pair of adjacent words and of a word's part of three characters; a word has weight 1."""
_COMMON_WEIGHT = 0.1


class HashEncoder:
    """Encodes texts as unit vectors; the vector of a text without words is zero."""

    name = "hash"
    metric: Literal["cosine"] = "cosine"
    prefixes = EncoderPrefixes()

    def __init__(self, dimension: int = DIMENSION) -> None:
        self.dimension = dimension

    def queries(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """[n, dimension], float32."""
        vectors = np.zeros((len(texts), self.dimension), np.float32)
        for row, text in zip(vectors, texts, strict=True):
            self._fill(row, text)
        return vectors

    def passages(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """[n, dimension], float32."""
        return self.queries(texts)

    def _fill(self, row: npt.NDArray[np.float32], text: str) -> None:
        for (feature, weight), count in Counter(_features(text)).items():
            sign = 1.0 if feature & 0x80000000 else -1.0
            row[(feature & 0x7FFFFFFF) % self.dimension] += sign * weight * (1.0 + math.log(count))
        length = float(np.linalg.norm(row))
        if length > 0.0:
            row /= length


def _features(text: str) -> Iterator[tuple[int, float]]:
    """Yields (hash, weight) of every occurrence of a feature."""
    previous = ""
    for word in words(text):
        yield from _word_features(word)
        if previous:
            yield zlib.crc32(f"{previous} {word}".encode()), _PAIR * _weight(previous) * _weight(word)
        previous = word


@lru_cache(maxsize=65536)
def _word_features(word: str) -> tuple[tuple[int, float], ...]:
    weight = _weight(word)
    bounded = f"<{word}>"
    parts = [bounded[at : at + 3] for at in range(len(bounded) - 2)] if len(word) > 3 else []
    part_weight = _PART * weight
    return (
        (zlib.crc32(word.encode()), weight),
        *((zlib.crc32(f"#{part}".encode()), part_weight) for part in parts),
    )


def _weight(word: str) -> float:
    return _COMMON_WEIGHT if word in COMMON else 1.0

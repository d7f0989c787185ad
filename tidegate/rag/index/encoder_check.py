"""Checks that an encoder is the one that built the index, by the stored vectors of two sentences."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from tidegate.errors import CorpusError
from tidegate.rag.encoders import Encoder
from tidegate.rag.files import replace_file
from tidegate.rag.index.manifest import EncoderEntry

FILE = "probe.npy"
_QUERY = "Which river flows through the old town?"
_PASSAGE = "The ferry leaves the harbour at nine and reaches the island before noon."
_MIN_COSINE = 0.99
"""Half precision stays above 0.999; other models are far below."""


def write_check_vectors(encoder: Encoder, directory: Path) -> None:
    vectors = _vectors(encoder)

    def write(path: Path) -> None:
        with path.open("wb") as file:
            np.save(file, vectors)

    replace_file(directory / FILE, write)


def check_encoder(entry: EncoderEntry, encoder: Encoder, directory: Path) -> None:
    """Raises CorpusError if the encoder differs from the one that encoded the passages."""
    for what, built, now in (
        ("dimension", entry.dimension, encoder.dimension),
        ("metric", entry.metric, encoder.metric),
        ("query prefix", entry.query_prefix, encoder.prefixes.query),
        ("passage prefix", entry.passage_prefix, encoder.prefixes.passage),
    ):
        if built != now:
            raise CorpusError(
                f"{directory} was built with the encoder {entry.name} and {what} {built!r}, where"
                f" {encoder.name} has {now!r}: use the encoder that built it, or build the index again"
            )
    before, after = np.load(directory / FILE), _vectors(encoder)
    if before.shape != after.shape or float(_cosine(before, after).min()) < _MIN_COSINE:
        raise CorpusError(
            f"{directory}: the encoder {encoder.name} does not encode as {entry.name} did when the index"
            " was built (its model or weights differ): use the original encoder, or build the index again"
        )


def _vectors(encoder: Encoder) -> npt.NDArray[np.float32]:
    return np.concatenate([encoder.queries([_QUERY]), encoder.passages([_PASSAGE])])


def _cosine(left: npt.NDArray[np.float32], right: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    lengths = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    cosines: npt.NDArray[np.float32] = np.sum(left * right, axis=1) / lengths
    return cosines

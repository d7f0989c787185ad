"""Whether an encoder is the one that an index was built with: what it makes of two sentences is kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from tidegate.errors import CorpusError
from tidegate.rag.encoders.encoder import Encoder
from tidegate.rag.files import replace_file
from tidegate.rag.index.manifest import EncoderEntry

FILE = "probe.npy"
_QUERY = "Which river flows through the old town?"
_PASSAGE = "The ferry leaves the harbour at nine and reaches the island before noon."
_ALIKE = 0.99
"""Cosine: half precision stays above 0.999, another model far below."""


def write_probe(encoder: Encoder, directory: Path) -> None:
    vectors = _vectors(encoder)

    def write(path: Path) -> None:
        with path.open("wb") as file:
            np.save(file, vectors)

    replace_file(directory / FILE, write)


def check_encoder(recorded: EncoderEntry, encoder: Encoder, directory: Path) -> None:
    """Raises CorpusError where queries would be encoded otherwise than the passages were."""
    for what, built, now in (
        ("dimension", recorded.dimension, encoder.dimension),
        ("metric", recorded.metric, encoder.metric),
        ("query prefix", recorded.query_prefix, encoder.prefixes.query),
        ("passage prefix", recorded.passage_prefix, encoder.prefixes.passage),
    ):
        if built != now:
            raise CorpusError(
                f"{directory} was built with the encoder {recorded.name} and {what} {built!r}, where"
                f" {encoder.name} has {now!r}: use the encoder that built it, or build the index again"
            )
    before, after = np.load(directory / FILE), _vectors(encoder)
    if before.shape != after.shape or float(_cosine(before, after).min()) < _ALIKE:
        raise CorpusError(
            f"{directory}: the encoder {encoder.name} does not encode as {recorded.name} did when the index"
            " was built (another model, or other weights): use that one, or build the index again"
        )


def _vectors(encoder: Encoder) -> npt.NDArray[np.float32]:
    return np.concatenate([encoder.queries([_QUERY]), encoder.passages([_PASSAGE])])


def _cosine(one: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    cosines: npt.NDArray[np.float32] = np.sum(one * other, axis=1) / lengths
    return cosines

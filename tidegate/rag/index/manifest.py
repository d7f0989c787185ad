"""The manifest of an index. It is written last, so a directory without one is not an index.

The stored vectors of two sentences show whether an encoder is the one that built the index.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError

from tidegate.errors import CorpusError
from tidegate.rag.encoders import WORD_RULES, Encoder, EncoderPrefixes, HashEncoder, Metric
from tidegate.rag.files import digest, quick_digest, replace_array, replace_file
from tidegate.rag.index.index_types import IndexKind

NAME = "manifest.json"
CHECK_VECTORS = "probe.npy"
FORMAT: Literal[1] = 1
FULL_DIGEST_UP_TO = 256 << 20
"""Maximum bytes of a file that is verified completely when an index is opened; larger ones are sampled."""
_AGAIN = "build the index again, or copy it again from an intact one"
_QUERY = "Which river flows through the old town?"
_PASSAGE = "The ferry leaves the harbour at nine and reaches the island before noon."
_MIN_COSINE = 0.99
"""Half precision stays above 0.999; other models are far below."""
_LIBRARIES = ("tidegate", "faiss-cpu", "faiss-gpu", "bm25s", "sentence-transformers", "transformers", "torch")

Mode = Literal["dense", "bm25", "hybrid"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileEntry(_Part):
    """A file of the index: its size, its BLAKE2b digest, and the digest of a sample (`glance`)."""

    name: str
    bytes: int
    blake2b: str
    glance: str

    @classmethod
    def of(cls, directory: Path, name: str) -> Self:
        path = directory / name
        return cls(name=name, bytes=path.stat().st_size, blake2b=digest(path), glance=quick_digest(path))

    def check(self, directory: Path, *, full: bool) -> None:
        path = directory / self.name
        if not path.is_file():
            raise CorpusError(f"{path} is missing: {_AGAIN}")
        if path.stat().st_size != self.bytes:
            raise CorpusError(
                f"{path} is {path.stat().st_size:,} bytes long, expected {self.bytes:,}: {_AGAIN}"
            )
        same = (
            digest(path) == self.blake2b
            if full or self.bytes <= FULL_DIGEST_UP_TO
            else quick_digest(path) == self.glance
        )
        if not same:
            raise CorpusError(f"{path} is damaged: {_AGAIN}")


class EncoderEntry(_Part):
    """The encoder that made the vectors."""

    name: str
    dimension: int
    metric: Metric
    query_prefix: str
    passage_prefix: str

    @classmethod
    def of(cls, encoder: Encoder) -> Self:
        return cls(
            name=encoder.name,
            dimension=encoder.dimension,
            metric=encoder.metric,
            query_prefix=encoder.prefixes.query,
            passage_prefix=encoder.prefixes.passage,
        )

    @property
    def prefixes(self) -> EncoderPrefixes:
        return EncoderPrefixes(self.query_prefix, self.passage_prefix)

    def check(self, encoder: Encoder, directory: Path) -> None:
        now = EncoderEntry.of(encoder)
        for field in ("dimension", "metric", "query_prefix", "passage_prefix"):
            if getattr(self, field) != getattr(now, field):
                raise CorpusError(
                    f"{directory} was built with the encoder {self.name} and {field.replace('_', ' ')}"
                    f" {getattr(self, field)!r}, where {now.name} has {getattr(now, field)!r}: use the"
                    " encoder that built it, or build the index again"
                )
        before, after = np.load(directory / CHECK_VECTORS), _check_vectors(encoder)
        if before.shape != after.shape or float(_cosine(before, after).min()) < _MIN_COSINE:
            raise CorpusError(
                f"{directory}: the encoder {now.name} does not encode as {self.name} did when the index"
                " was built (its model or weights differ): use the original encoder, or build the index again"
            )


class IndexEntry(_Part):
    """The vector index. `recall` maps k to recall@k, measured with `nprobe` (None without inverted lists);
    `target` is the recall that the build aimed at."""

    kind: IndexKind
    nprobe: int | None
    recall: dict[int, float]
    target: float

    @property
    def summary(self) -> str:
        """The type, nprobe, and recall."""
        nprobe = [] if self.nprobe is None else [f"nprobe {self.nprobe}"]
        recalls = [f"recall@{k} {recall:.3f}" for k, recall in self.recall.items()]
        return ", ".join([self.kind, *nprobe, *recalls])

    @property
    def warning(self) -> str | None:
        """A warning if the recall is below the target, else None."""
        missed = [f"recall@{k} is {recall:.3f}" for k, recall in self.recall.items()]
        if min(self.recall.values()) >= self.target:
            return None
        return (
            f"{', '.join(missed)} against exact search, below the target of {self.target:g}, and a larger"
            " nprobe does not help: build with an --index of more bytes per vector (ivf-pq < ivf-sq8 <"
            " ivf-flat < flat), or with a lower --recall"
        )


class Manifest(_Part):
    """Description of an index. `corpus` is the BLAKE2b digest of the stored documents."""

    format: Literal[1] = FORMAT
    generation: str
    documents: int
    corpus: str
    encoder: EncoderEntry | None
    index: IndexEntry | None
    bm25: bool
    word_rules: int = 1
    files: tuple[FileEntry, ...]
    versions: dict[str, str]

    @property
    def modes(self) -> tuple[Mode, ...]:
        if self.index is None:
            return ("bm25",) if self.bm25 else ()
        return ("dense", "bm25", "hybrid") if self.bm25 else ("dense",)

    def check_files(self, directory: Path, *, full: bool = False) -> None:
        """Verifies the files by digest; samples the large ones unless `full` is set.

        Raises CorpusError, which names the file.
        """
        for file in self.files:
            file.check(directory / self.generation, full=full)

    def write(self, directory: Path) -> None:
        text = self.model_dump_json(indent=2)
        replace_file(directory / NAME, lambda path: path.write_text(text + "\n"))

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Reads a manifest. Raises CorpusError if it is missing or invalid."""
        path = directory / NAME
        try:
            text = path.read_text()
        except (FileNotFoundError, NotADirectoryError):
            raise CorpusError(
                f"{directory} holds no index: it has no {NAME}; build one with `tidegate rag build`"
            ) from None
        try:
            manifest = cls.model_validate_json(text)
        except ValidationError as error:
            wrong = error.errors()[0]
            where = ".".join(map(str, wrong["loc"])) or "the file"
            raise CorpusError(
                f"{path} is not a manifest of format {FORMAT} ({where}: {wrong['msg']}); build the index"
                " again, with --replace"
            ) from None
        hashed = manifest.encoder is not None and manifest.encoder.name == HashEncoder.name
        if manifest.word_rules != WORD_RULES and (manifest.bm25 or hashed):
            raise CorpusError(
                f"{path}: the index was built by version {manifest.word_rules} of the rules for words, and"
                f" queries are split by version {WORD_RULES}; build the index again, with --replace"
            )
        return manifest


def write_check_vectors(encoder: Encoder, directory: Path) -> None:
    vectors = _check_vectors(encoder)
    replace_array(directory / CHECK_VECTORS, vectors)


def _check_vectors(encoder: Encoder) -> npt.NDArray[np.float32]:
    return np.concatenate([encoder.queries([_QUERY]), encoder.passages([_PASSAGE])])


def _cosine(left: npt.NDArray[np.float32], right: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    lengths = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    cosines: npt.NDArray[np.float32] = np.sum(left * right, axis=1) / lengths
    return cosines


def versions() -> dict[str, str]:
    """Returns the installed versions of the libraries that build an index."""
    installed = {}
    for name in _LIBRARIES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed

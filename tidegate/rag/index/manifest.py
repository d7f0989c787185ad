"""The manifest of an index. It is written last, so a directory without one is not an index."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from tidegate.errors import CorpusError
from tidegate.rag.encoders import Metric
from tidegate.rag.files import digest, quick_digest, replace_file
from tidegate.rag.index.index_types import IndexKind

NAME = "manifest.json"
FORMAT: Literal[1] = 1
FULL_DIGEST_UP_TO = 256 << 20
"""Maximum bytes of a file that is verified completely when an index is opened; larger ones are sampled."""
_AGAIN = "build the index again, or copy it again from an intact one"
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
        """Raises CorpusError if the file is not the one that was written."""
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


class IndexEntry(_Part):
    """The vector index. `recall` maps k to recall@k, measured with `nprobe` (None without inverted lists)."""

    kind: IndexKind
    nprobe: int | None
    recall: dict[int, float]


class Manifest(_Part):
    """Description of an index. `corpus` is the BLAKE2b digest of the stored documents."""

    format: Literal[1] = FORMAT
    generation: str
    documents: int
    corpus: str
    encoder: EncoderEntry | None
    index: IndexEntry | None
    bm25: bool
    files: tuple[FileEntry, ...]
    versions: dict[str, str]

    @property
    def modes(self) -> tuple[Mode, ...]:
        """Search modes; the first is the default."""
        dense: tuple[Mode, ...] = ("dense",) if self.index is not None else ()
        bm25: tuple[Mode, ...] = ("bm25",) if self.bm25 else ()
        hybrid: tuple[Mode, ...] = ("hybrid",) if dense and bm25 else ()
        return dense + bm25 + hybrid

    def check_files(self, directory: Path, *, full: bool = False) -> None:
        """Verifies the files by digest; samples the large ones unless `full` is set.

        Raises CorpusError, which names the file.
        """
        for file in self.files:
            file.check(directory / self.generation, full=full)

    def write(self, directory: Path) -> None:
        """Writes the manifest atomically."""
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
            return cls.model_validate_json(text)
        except ValidationError as error:
            wrong = error.errors()[0]
            where = ".".join(map(str, wrong["loc"])) or "the file"
            raise CorpusError(
                f"{path} is not a manifest of format {FORMAT} ({where}: {wrong['msg']}); build the index"
                " again, with --replace"
            ) from None


def versions() -> dict[str, str]:
    """Returns the installed versions of the libraries that build an index."""
    installed = {}
    for name in _LIBRARIES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed

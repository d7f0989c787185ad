"""What an index was built from and with. It is written last: a directory without one is not an index."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from tidegate.errors import CorpusError
from tidegate.rag.encoders.encoder import Metric
from tidegate.rag.files import digest, glance, replace_file
from tidegate.rag.index.index_types import IndexKind

NAME = "manifest.json"
FORMAT: Literal[1] = 1
WHOLE_UP_TO = 256 << 20
"""Bytes of a file that is read whole whenever it is opened; of larger ones, parts are."""
_AGAIN = "build the index again, or copy it again from where it is whole"
_LIBRARIES = ("tidegate", "faiss-cpu", "faiss-gpu", "bm25s", "sentence-transformers", "transformers", "torch")

Mode = Literal["dense", "bm25", "hybrid"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileEntry(_Part):
    """A file of the index: its size, the BLAKE2b of all of it, and that of parts of it."""

    name: str
    bytes: int
    blake2b: str
    glance: str

    @classmethod
    def of(cls, directory: Path, name: str) -> Self:
        path = directory / name
        return cls(name=name, bytes=path.stat().st_size, blake2b=digest(path), glance=glance(path))

    def check(self, directory: Path, *, whole: bool) -> None:
        """Raises CorpusError where the file is not the one that was written."""
        path = directory / self.name
        if not path.is_file():
            raise CorpusError(f"{path} is missing: {_AGAIN}")
        if path.stat().st_size != self.bytes:
            raise CorpusError(f"{path} is {path.stat().st_size:,} bytes long, not {self.bytes:,}: {_AGAIN}")
        same = (
            digest(path) == self.blake2b
            if whole or self.bytes <= WHOLE_UP_TO
            else glance(path) == self.glance
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
    """The vector index; `recall` is the share of the truly nearest that it finds, by k, and of what it was
    measured: `nprobe` cells looked at, where there are cells."""

    kind: IndexKind
    nprobe: int | None
    recall: dict[int, float]


class Manifest(_Part):
    """`corpus` is the BLAKE2b of the documents, whatever form they came in."""

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
        """The ways to search; the first is the default."""
        dense: tuple[Mode, ...] = ("dense",) if self.index is not None else ()
        bm25: tuple[Mode, ...] = ("bm25",) if self.bm25 else ()
        hybrid: tuple[Mode, ...] = ("hybrid",) if dense and bm25 else ()
        return dense + bm25 + hybrid

    def check_files(self, directory: Path, *, whole: bool = False) -> None:
        """Compare the files with what was written: small ones whole, of large ones parts, or all `whole`.

        Raises CorpusError that names the file.
        """
        for file in self.files:
            file.check(directory / self.generation, whole=whole)

    def write(self, directory: Path) -> None:
        text = self.model_dump_json(indent=2)
        replace_file(directory / NAME, lambda path: path.write_text(text + "\n"))

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Raises CorpusError where there is none, or none that this version reads."""
        path = directory / NAME
        try:
            text = path.read_text()
        except (FileNotFoundError, NotADirectoryError):
            raise CorpusError(
                f"{directory} holds no index: there is no {NAME}; `tidegate rag build` makes one"
            ) from None
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            wrong = error.errors()[0]
            where = ".".join(map(str, wrong["loc"])) or "the file"
            raise CorpusError(
                f"{path} is no manifest of format {FORMAT} ({where}: {wrong['msg']}); build the index again,"
                " with --replace"
            ) from None


def versions() -> dict[str, str]:
    """The versions that are installed of what an index is built with."""
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found

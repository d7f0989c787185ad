"""What an index was built from and with. It is written last: a directory without one is not an index."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from tidegate.errors import CorpusError
from tidegate.rag.encode import Metric
from tidegate.rag.files import digest, replace_file

NAME = "manifest.json"
FORMAT = 1
_LIBRARIES = ("tidegate", "faiss-cpu", "faiss-gpu", "bm25s", "sentence-transformers", "transformers", "torch")

IndexKind = Literal["flat", "sq8", "ivf-sq8", "ivf-pq"]
Mode = Literal["dense", "bm25", "hybrid"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileEntry(_Part):
    """A file of the index: its name, size and BLAKE2b."""

    name: str
    bytes: int
    blake2b: str

    @classmethod
    def of(cls, directory: Path, name: str) -> Self:
        path = directory / name
        return cls(name=name, bytes=path.stat().st_size, blake2b=digest(path))


class EncoderEntry(_Part):
    """The encoder that made the vectors; `probe` is how it encodes `PROBE`, in part."""

    name: str
    dimension: int
    metric: Metric
    query_prefix: str
    passage_prefix: str
    probe: tuple[float, ...]


class IndexEntry(_Part):
    """The vector index; `recall` is the share of Flat's nearest that it finds, by k."""

    kind: IndexKind
    nprobe: int | None = None
    recall: dict[int, float] = {}


class Manifest(_Part):
    """`corpus` is the BLAKE2b of the documents, whatever form they came in."""

    format: int = FORMAT
    generation: str
    documents: int
    corpus: str
    encoder: EncoderEntry | None = None
    index: IndexEntry | None = None
    bm25: bool = False
    files: tuple[FileEntry, ...]
    versions: dict[str, str]

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The ways to search; the first is the default."""
        dense: tuple[Mode, ...] = ("dense",) if self.index is not None else ()
        bm25: tuple[Mode, ...] = ("bm25",) if self.bm25 else ()
        hybrid: tuple[Mode, ...] = ("hybrid",) if dense and bm25 else ()
        return dense + bm25 + hybrid

    def write(self, directory: Path) -> None:
        text = self.model_dump_json(indent=2)
        replace_file(directory / NAME, lambda path: path.write_text(text + "\n"))

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Raises CorpusError where there is none, or none that this version reads."""
        path = directory / NAME
        try:
            text = path.read_text()
        except FileNotFoundError:
            raise CorpusError(
                f"{directory} holds no index: there is no {NAME}; `tidegate rag build` makes one"
            ) from None
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise CorpusError(
                f"{path} is not a manifest of format {FORMAT}; build the index again: {error}"
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

"""Reads the rows of source files: JSONL (plain or gzipped) or parquet."""

from __future__ import annotations

import contextlib
import gzip
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import orjson

from tidegate.errors import ConfigError
from tidegate.program import advise_extra
from tidegate.rag.corpus.corpus import Document
from tidegate.service import exact

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
_ID_KEYS = ("id", "_id", "docid")
_KEYS = tuple(f'"{key}"'.encode() for key in (*_ID_KEYS, "text", "title", "contents"))
_BATCH = 1024
_SAMPLE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A row of a source file: its location, and its values or its line of JSON."""

    where: str
    values: Mapping[str, Any] | bytes

    def document(self) -> Document:
        """Returns the row's document. Raises ValueError, which names the fault.

        The id is `id`, `_id` or `docid`, a string or an integer. The content is `text` with an optional
        `title`, or `contents`, whose first line is the title in double quotes.
        """
        values = _parsed(self.values) if isinstance(self.values, bytes) else self.values
        id = _id(values)
        if "contents" in values:
            title, text = _split(_text(values, "contents"))
        elif "text" in values:
            title = "" if values.get("title") is None else _text(values, "title")
            text = _text(values, "text")
        else:
            raise ValueError(f"the row has neither 'contents' nor 'text' (it has {_names(values)})")
        if not title.strip() and not text.strip():
            raise ValueError(f"the document {id!r} is empty: remove the row, or add a text")
        return Document(id, title, text)


def count_rows(files: Sequence[Path]) -> int:
    """Returns the number of rows; approximate if files are large, from the first megabytes of each."""
    return sum(_parquet_rows(path) if path.suffix == ".parquet" else _jsonl_rows(path) for path in files)


def source_files(paths: Sequence[Path]) -> list[Path]:
    """Returns the files to read, in order; a directory is replaced by its files, sorted by name.

    Raises ConfigError if there is nothing to read.
    """
    files: list[Path] = []
    for path in paths:
        inside = sorted(file for file in path.iterdir() if _supported(file)) if path.is_dir() else [path]
        if not inside:
            raise ConfigError(f"{path} has no {', '.join(SUFFIXES)} file")
        files += inside
    for path in files:
        if not path.is_file():
            raise ConfigError(f"{path}: no such file")
        if not _supported(path):
            raise ConfigError(f"{path}: a corpus must be a {', '.join(SUFFIXES)} file or a directory of them")
    return files


def read_rows(files: Sequence[Path]) -> Iterator[SourceRow]:
    """Yields all rows. Lines of JSON are not parsed, and blank ones do not count."""
    for path in files:
        if path.suffix == ".parquet":
            for number, values in enumerate(_parquet(path), 1):
                yield SourceRow(f"{path}, row {number}", values)
        else:
            for number, line in _jsonl(path):
                yield SourceRow(f"{path}, line {number}", line)


def _id(values: Mapping[str, Any]) -> str:
    for key in _ID_KEYS:
        if key in values:
            id = _decoded(values, key)
            if isinstance(id, bool) or not isinstance(id, str | int) or id == "":
                raise ValueError(f"{key!r} is {_short(id)}; it must be a string or an integer")
            return str(id)
    raise ValueError(f"the row has no 'id' (it has {_names(values)})")


def _text(values: Mapping[str, Any], key: str) -> str:
    value = _decoded(values, key)
    if not isinstance(value, str):
        raise ValueError(f"{key!r} is {_short(value)}, not a string")
    return value


def _decoded(values: Mapping[str, Any], key: str) -> Any:
    """Returns a value; bytes (text of a parquet column without the type of texts) as a string."""
    value = values[key]
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{key!r} has bytes that are not UTF-8: {error.reason} at byte {error.start}"
        ) from None


def _split(contents: str) -> tuple[str, str]:
    """Returns title and text; without a quoted first line the title is empty."""
    first, _, rest = contents.partition("\n")
    first = first.strip()
    if len(first) >= 2 and first[0] == first[-1] == '"':
        return first[1:-1], rest
    return "", contents


def _jsonl(path: Path) -> Iterator[tuple[int, bytes]]:
    with _open(path) as (_, file):
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                yield number, line


def _jsonl_rows(path: Path) -> int:
    with _open(path) as (stored, file):
        sample = file.read(_SAMPLE_BYTES)
        lines = sum(1 for line in sample.splitlines() if line.strip())
        if len(sample) < _SAMPLE_BYTES:
            return lines
        # For a gzipped file, `tell` is the position in the compressed file.
        return int(lines * path.stat().st_size / stored.tell())


def _parquet_rows(path: Path) -> int:
    with _open_parquet(path) as file:
        return int(file.metadata.num_rows)


def _parsed(line: bytes) -> Mapping[str, Any]:
    try:
        values = orjson.loads(line)
        if any(line.count(key) > 1 for key in _KEYS):  # of a repeated key, orjson keeps the last value
            exact.loads_strictly(line)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error}; each line must be one object") from None
    if not isinstance(values, dict):
        raise ValueError(f"{_short(values)} is not an object")
    return values


@contextlib.contextmanager
def _open(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes] | gzip.GzipFile]]:
    """Opens a file; yields the stored and the decompressed file. Raises ConfigError if reading fails."""
    try:
        with path.open("rb") as stored, gzip.open(stored) if path.suffix == ".gz" else stored as file:
            yield stored, file
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read to its end ({error}); it may be truncated") from None


def _parquet(path: Path) -> Iterator[Mapping[str, Any]]:
    with _open_parquet(path) as file:
        for batch in file.iter_batches(_BATCH, columns=_columns(file)):
            yield from batch.to_pylist()


@contextlib.contextmanager
def _open_parquet(path: Path) -> Iterator[Any]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise ConfigError(
            f"{path}: reading parquet needs pyarrow: {advise_extra('rag')}, or convert it to JSONL"
        ) from None
    try:
        with parquet.ParquetFile(path) as file:
            yield file
    except (ArrowException, OSError) as error:
        raise ConfigError(f"{path}: not a readable parquet file: {error}") from None


def _columns(file: Any) -> list[str]:
    return [name for name in file.schema_arrow.names if name in (*_ID_KEYS, "contents", "title", "text")]


def _supported(path: Path) -> bool:
    return path.name.endswith(SUFFIXES)


def _names(values: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, values)) or "no keys"


def _short(value: Any) -> str:
    text = orjson.dumps(value, default=str).decode()
    return text if len(text) <= 60 else f"{text[:57]}…"

"""The rows of a corpus as people keep it: JSONL (plain or gzipped) or parquet, one file or many."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import orjson

from tidegate.errors import ConfigError
from tidegate.rag.corpus.corpus import Document

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
_ID_KEYS = ("id", "_id", "docid")
_BATCH = 1024
_LOOK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that is no document: where it is and what is wrong with it."""

    where: str
    why: str

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A row as it was found: its place, and its values or what is wrong with them."""

    where: str
    values: Mapping[str, Any] | str

    def document(self) -> Document | BadRow:
        if isinstance(self.values, str):
            return BadRow(self.where, self.values)
        try:
            return document_of(self.values)
        except ValueError as error:
            return BadRow(self.where, str(error))


@dataclass(frozen=True, slots=True)
class Extent:
    """How large a corpus is: about, where it was too large to be counted."""

    documents: int
    bytes: int


def extent(files: Sequence[Path]) -> Extent:
    """Judged by the first megabytes of each file."""
    found = [_parquet_extent(path) if path.suffix == ".parquet" else _jsonl_extent(path) for path in files]
    return Extent(sum(one.documents for one in found), sum(one.bytes for one in found))


def source_files(paths: Sequence[Path]) -> list[Path]:
    """The files to read, in order; a directory stands for those in it, by name.

    Raises ConfigError where there is nothing to read.
    """
    found: list[Path] = []
    for path in paths:
        inside = sorted(one for one in path.iterdir() if _known(one)) if path.is_dir() else [path]
        if not inside:
            raise ConfigError(f"{path} holds no {', '.join(SUFFIXES)} file")
        found += inside
    for path in found:
        if not path.is_file():
            raise ConfigError(f"{path}: there is no such file")
        if not _known(path):
            raise ConfigError(f"{path}: a corpus is a {', '.join(SUFFIXES)} file, or a directory of them")
    return found


def read_rows(files: Sequence[Path], skip: int = 0) -> Iterator[SourceRow]:
    """Every row after the first `skip` ones, which are not parsed. Blank lines are no rows."""
    for path in files:
        rows = _parquet(path, skip) if path.suffix == ".parquet" else _jsonl(path, skip)
        for number, row in rows:
            skip = max(0, skip - 1)
            if row is not None:
                yield SourceRow(f"{path}, {'row' if path.suffix == '.parquet' else 'line'} {number}", row)


def places(files: Sequence[Path], numbers: Sequence[int]) -> dict[int, str]:
    """Where the rows with these numbers (counted from 0, over all files) are."""
    wanted = set(numbers)
    return {number: row.where for number, row in enumerate(read_rows(files)) if number in wanted}


def document_of(values: Mapping[str, Any]) -> Document:
    """A row's document. Raises ValueError that says what the row lacks.

    The id is `id`, `_id` or `docid`, a text or a whole number. The rest is `text` with or without a
    `title`, or `contents`: the title in double quotes on the first line, the text after it.
    """
    id = _id(values)
    if "contents" in values:
        title, text = _split(_text(values, "contents"))
    elif "text" in values:
        title, text = _text(values, "title") if values.get("title") is not None else "", _text(values, "text")
    else:
        raise ValueError(f"it has neither 'contents' nor 'text' (it has {_names(values)})")
    if not title.strip() and not text.strip():
        raise ValueError(f"the document {id!r} is empty: remove the row, or give it a text")
    return Document(id, title, text)


def _id(values: Mapping[str, Any]) -> str:
    for key in _ID_KEYS:
        if key in values:
            id = values[key]
            if isinstance(id, bool) or not isinstance(id, str | int) or id == "":
                raise ValueError(f"{key!r} is {_short(id)}; a text or a whole number is needed")
            return str(id)
    raise ValueError(f"it has no 'id' (it has {_names(values)})")


def _text(values: Mapping[str, Any], key: str) -> str:
    value = values[key]
    if not isinstance(value, str):
        raise ValueError(f"{key!r} is {_short(value)}, not a text")
    return value


def _split(contents: str) -> tuple[str, str]:
    """Title and text; without a quoted first line all of it is text."""
    first, _, rest = contents.partition("\n")
    first = first.strip()
    if len(first) >= 2 and first[0] == first[-1] == '"':
        return first[1:-1], rest
    return "", contents


def _jsonl(path: Path, skip: int) -> Iterator[tuple[int, Mapping[str, Any] | str | None]]:
    with _open(path) as (_, file):
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            if skip > 0:
                skip -= 1
                yield number, None
                continue
            yield number, _parsed(line)


def _jsonl_extent(path: Path) -> Extent:
    with _open(path) as (stored, file):
        seen = file.read(_LOOK_BYTES)
        lines = sum(1 for line in seen.splitlines() if line.strip())
        if len(seen) < _LOOK_BYTES:
            return Extent(lines, len(seen))
        # Of a gzipped file this is where its compressed part has been read to.
        share = path.stat().st_size / stored.tell()
    return Extent(int(lines * share), int(len(seen) * share))


def _parquet_extent(path: Path) -> Extent:
    with _open_parquet(path) as file:
        columns = [file.schema_arrow.get_field_index(name) for name in _wanted(file)]
        groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
        held = sum(group.column(column).total_uncompressed_size for group in groups for column in columns)
        return Extent(file.metadata.num_rows, held)


def _parsed(line: bytes) -> Mapping[str, Any] | str:
    try:
        values = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return f"not valid JSON: {error}; one object a line is needed"
    return values if isinstance(values, dict) else f"{_short(values)}, not an object with keys"


@contextlib.contextmanager
def _open(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes] | gzip.GzipFile]]:
    """The file as it is stored, and its lines. Raises ConfigError where they cannot be read to the end."""
    try:
        with path.open("rb") as stored, gzip.open(stored) if path.suffix == ".gz" else stored as file:
            yield stored, file
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read to its end: {error}; is it whole?") from None


def _parquet(path: Path, skip: int) -> Iterator[tuple[int, Mapping[str, Any] | None]]:
    with _open_parquet(path) as file:
        number = itertools.count(1)
        for batch in file.iter_batches(_BATCH, columns=_wanted(file)):
            skipped = min(skip, batch.num_rows)
            skip -= skipped
            for _ in range(skipped):
                yield next(number), None
            for values in batch.slice(skipped).to_pylist():
                yield next(number), values


@contextlib.contextmanager
def _open_parquet(path: Path) -> Iterator[Any]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise ConfigError(
            f"{path}: reading parquet needs pyarrow: pip install 'tidegate[rag]', or convert it to JSONL"
        ) from None
    try:
        with parquet.ParquetFile(path) as file:
            yield file
    except (ArrowException, OSError) as error:
        raise ConfigError(f"{path}: not a parquet file that can be read: {error}") from None


def _wanted(file: Any) -> list[str]:
    """The columns that a document is made of."""
    return [name for name in file.schema_arrow.names if name in (*_ID_KEYS, "contents", "title", "text")]


def _known(path: Path) -> bool:
    return path.name.endswith(SUFFIXES)


def _names(values: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, values)) or "no keys"


def _short(value: Any) -> str:
    text = orjson.dumps(value, default=str).decode()
    return text if len(text) <= 60 else f"{text[:57]}…"

"""Reads the rows of a data file (JSONL, CSV or parquet), with their line numbers for errors."""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from tidegate.errors import ConfigError
from tidegate.loading import did_you_mean
from tidegate.program import advise_extra
from tidegate.service import exact


@dataclass(frozen=True, slots=True)
class DataRow:
    """One row; `number` is its line (JSONL) or its position (CSV, parquet), from 1."""

    file: Path
    number: int
    values: dict[str, Any]
    unusable: Mapping[str, str] = field(default_factory=dict)
    """Columns that `values` lacks because JSON has no form for what they have, with the reason."""

    def __getitem__(self, key: str) -> Any:
        """Returns a column's value; raises ConfigError, which names file, line and key, if it is missing."""
        if key in self.unusable:
            raise self.error(f"{key!r} has {self.unusable[key]}")
        if key not in self.values:
            has = ", ".join(map(repr, self.values)) or "none"
            raise self.error(f"there is no key {key!r}{did_you_mean(key, self.values)} (it has {has})")
        return self.values[key]

    def text(self, key: str) -> str:
        """Returns a column's text; raises ConfigError if it is missing, of another type, or empty."""
        value = self[key]
        if not isinstance(value, str):
            raise self.error(f"{key!r} is {_short(value)}, not a text")
        if not value.strip():
            raise self.error(f"{key!r} is empty")
        return value

    def error(self, message: str) -> ConfigError:
        return ConfigError(f"{self.file}, {self.position}: {message}")

    @property
    def position(self) -> str:
        return f"{'row' if self.file.suffix in ('.csv', '.parquet') else 'line'} {self.number}"


def read_rows(path: Path) -> list[DataRow]:
    """Reads a `.jsonl`, `.csv` or `.parquet` file; raises ConfigError, which names file and line."""
    if path.is_dir():
        raise ConfigError(f"{path} is a directory; name the .jsonl, .csv or .parquet file in it")
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such data file")
    readers = {".parquet": _parquet, ".csv": _csv}
    rows = list(readers.get(path.suffix, _jsonl)(path))
    if not rows:
        raise ConfigError(f"{path} contains no rows")
    return rows


def _jsonl(path: Path) -> Iterator[DataRow]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            if line.lstrip().startswith(b"["):
                raise ConfigError(f"{where}: a list; write one object a line, as jq -c '.[]' {path} does")
            try:
                values = exact.loads_strictly(line)
            except UnicodeDecodeError as error:
                raise ConfigError(f"{where}: not UTF-8: {error.reason} at byte {error.start}") from None
            except ValueError as error:
                raise ConfigError(f"{where}: not valid JSON: {error}; each line must be one object") from None
            if not isinstance(values, dict):
                raise ConfigError(f"{where}: {_short(values)}, not an object with keys")
            yield DataRow(path, number, values)


def _csv(path: Path) -> Iterator[DataRow]:
    """Yields the rows below the header, with texts in columns separated by commas, semicolons or tabs."""
    csv.field_size_limit(sys.maxsize)  # its default is 131,072 characters
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            delimiter = max(",;\t", key=lambda separator: _header_cells(file, separator))
            file.seek(0)
            reader = csv.DictReader(file, delimiter=delimiter, strict=True)
            columns = reader.fieldnames or ()
            if twice := {name for name in columns if columns.count(name) > 1}:
                raise ConfigError(
                    f"{path}: the header has {', '.join(map(repr, twice))} twice; rename one column"
                )
            for number, values in enumerate(reader, 1):
                row = DataRow(path, number, values)
                if None in values or None in values.values():
                    raise row.error(
                        f"it does not have the {len(columns)} cells of the header; put a text that has a "
                        f"separator ({reader.reader.dialect.delimiter!r}) in quotes"
                    )
                yield row
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not UTF-8: byte {error.object[error.start]:#x} ({error.reason}); save it as UTF-8"
        ) from None
    except csv.Error as error:
        raise ConfigError(f"{path} cannot be read as CSV: line {reader.reader.line_num}: {error}") from None


def _header_cells(file: TextIO, delimiter: str) -> int:
    file.seek(0)
    return len(next(csv.reader(file, delimiter=delimiter), ()))


def _parquet(path: Path) -> Iterator[DataRow]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise ConfigError(
            f"{path}: reading parquet needs pyarrow: {advise_extra('data')}, or convert it to JSONL"
        ) from None
    try:
        table = parquet.read_table(path).to_pylist(maps_as_pydicts="strict")
    except (ArrowException, OSError, KeyError, ValueError, OverflowError) as error:  # the latter of dates
        raise ConfigError(f"{path} cannot be read as parquet: {error}") from None
    for number, columns in enumerate(table, 1):
        values, unusable = {}, {}
        for key, value in columns.items():
            try:
                values[key] = _plain(value)
            except UnicodeDecodeError as error:
                unusable[key] = f"bytes that are not UTF-8: {error.reason} at byte {error.start}"
            except ValueError as error:
                unusable[key] = str(error)
        yield DataRow(path, number, values, unusable)


def _plain(value: Any) -> Any:
    """Returns a parquet value in JSON's types: dates and decimals as text, bytes decoded, NaN as None.

    A nested object has the keys of all rows in each row. Its keys without a value are left out, so that a
    tool call has no arguments of other rows; a message keeps its `content`. Raises UnicodeDecodeError, and
    ValueError for an infinite number.
    """
    if isinstance(value, dict):
        plain = {str(key): _plain(item) for key, item in value.items()}
        return {key: item for key, item in plain.items() if item is not None or key == "content"}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, float) and not math.isfinite(value):
        if math.isinf(value):
            raise ValueError(f"{value}, which is not a JSON number")
        return None
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _short(value: Any) -> str:
    if value is None:
        return "null"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}…"

"""The rows of a data file: JSONL or parquet, each row knowing where it stands."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidegate.errors import ConfigError
from tidegate.loading import did_you_mean


@dataclass(frozen=True, slots=True)
class DataRow:
    """One row; `number` is its line (JSONL) or its place (parquet), counted from 1."""

    file: Path
    number: int
    values: dict[str, Any]

    def __getitem__(self, key: str) -> Any:
        """A column's value; raises ConfigError that names file, line and key."""
        if key not in self.values:
            has = ", ".join(map(repr, self.values)) or "none"
            raise self.error(f"there is no key {key!r}{did_you_mean(key, self.values)} (it has {has})")
        return self.values[key]

    def text(self, key: str) -> str:
        """A column's text; raises ConfigError where it is missing, no text, or empty."""
        value = self[key]
        if not isinstance(value, str):
            raise self.error(f"{key!r} is {_short(value)}, not a text")
        if not value.strip():
            raise self.error(f"{key!r} is empty")
        return value

    def error(self, message: str) -> ConfigError:
        """What is wrong with this row, and where it is."""
        return ConfigError(f"{self.file}, {self.place}: {message}")

    @property
    def place(self) -> str:
        return f"{'row' if is_parquet(self.file) else 'line'} {self.number}"


def read_rows(path: Path) -> list[DataRow]:
    """All rows of a `.jsonl` or `.parquet` file.

    Raises ConfigError that names the file, and the line where there is one.
    """
    if path.is_dir():
        raise ConfigError(f"{path} is a directory; name the .jsonl or .parquet file in it")
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such data file")
    rows = list(_parquet(path) if is_parquet(path) else _jsonl(path))
    if not rows:
        raise ConfigError(f"{path} holds no rows")
    return rows


def is_parquet(path: Path) -> bool:
    return path.suffix == ".parquet"


def _jsonl(path: Path) -> Iterator[DataRow]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                values = json.loads(line, parse_constant=_no_constant, parse_float=_finite, parse_int=_whole)
                if b"\\ud" in line.lower():
                    _check_characters(values)
            except UnicodeDecodeError as error:
                raise ConfigError(f"{where}: not UTF-8: {error.reason} at byte {error.start}") from None
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{where}: not valid JSON: {error}; one object a line is needed") from None
            if not isinstance(values, dict):
                raise ConfigError(f"{where}: {_short(values)}, not an object with keys")
            yield DataRow(path, number, values)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"{text[:60]} is no number that can be held")
    return number


def _whole(text: str) -> int | str:
    """A whole number; one of more than 64 bits stays the text it is, for no message could carry it."""
    fits = len(text) <= 20 and -(2**63) <= int(text) < 2**64
    return int(text) if fits else text


def _check_characters(values: Any) -> None:
    """Raises ValueError for half of an escaped pair of surrogates: no character, which nothing can encode."""
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = json.dumps(error.object[error.start])
        raise ValueError(f"{half} is half of a character") from None


def _parquet(path: Path) -> Iterator[DataRow]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise ConfigError(
            f"{path}: reading parquet needs pyarrow: pip install 'tidegate[data]', or convert it to JSONL"
        ) from None
    try:
        table = parquet.read_table(path).to_pylist()
    except (ArrowException, OSError) as error:
        raise ConfigError(f"{path}: not a parquet file that can be read: {error}") from None
    for number, values in enumerate(table, 1):
        yield DataRow(path, number, {key: _plain(value) for key, value in values.items()})


def _plain(value: Any) -> Any:
    """A parquet value as JSON has it: what JSON lacks (dates, decimals, bytes, NaN) as text or None."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _short(value: Any) -> str:
    """A value for an error's message."""
    if value is None:
        return "null"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}…"

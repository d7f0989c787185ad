"""The documents of an index, in memory-mapped files; opening a corpus reads no document.

A corpus has three files: `documents.jsonl`, an object `{id, title, text}` per line; `documents.offsets`, the
start of each line and the end of the last one, int64 [n + 1]; and `documents.ids`, 2 · n uint64: the ids'
hashes in ascending order, then their rows.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import orjson

from tidegate.errors import CorpusError

DATA = "documents.jsonl"
OFFSETS = "documents.offsets"
IDS = "documents.ids"
FILES = (DATA, OFFSETS, IDS)


@dataclass(frozen=True, slots=True)
class Document:
    """A passage. Its `id` is from the corpus and does not depend on the index."""

    id: str
    title: str
    text: str

    def passage(self) -> str:
        """Returns the text that encoders and BM25 index."""
        return f"{self.title}\n{self.text}" if self.title else self.text


class Corpus:
    """Documents by row (in source order) and by id; thread-safe."""

    def __init__(
        self, data: mmap.mmap, offsets: npt.NDArray[np.int64], hashes: npt.NDArray[np.uint64],
        rows: npt.NDArray[np.uint64],
    ) -> None:  # fmt: skip
        self._data = data
        self._offsets = offsets
        self._hashes = hashes
        self._rows = rows

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Maps the files of a corpus. Raises CorpusError if they are inconsistent."""
        for name in FILES:
            if not (directory / name).is_file():
                raise CorpusError(f"{directory}: {name} is missing; build the index again")
        data, offsets = open_documents(directory)
        ids = np.memmap(directory / IDS, np.uint64, mode="r")
        count = len(offsets) - 1
        if len(ids) != 2 * count:
            raise CorpusError(f"{directory}: {IDS} does not match {OFFSETS}; build the index again")
        return cls(data, offsets, ids[:count], ids[count:])

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, row: int) -> Document:
        """Returns a document. Raises IndexError for a row outside 0 … n − 1, CorpusError if it is damaged."""
        return read_document(self._data, self._offsets, row)

    def __iter__(self) -> Iterator[Document]:
        return (self[row] for row in range(len(self)))

    def row(self, id: str) -> int | None:
        """Returns the row of the document with this id, or None."""
        key = id_hash(id)
        index = int(np.searchsorted(self._hashes, np.uint64(key)))
        while index < len(self) and int(self._hashes[index]) == key:
            row = int(self._rows[index])
            if self[row].id == id:
                return row
            index += 1
        return None


def open_documents(directory: Path) -> tuple[mmap.mmap, npt.NDArray[np.int64]]:
    """Returns the mapped documents and their offsets, [n + 1]. Raises CorpusError if they do not match."""
    offsets = np.memmap(directory / OFFSETS, np.int64, mode="r")
    with (directory / DATA).open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if int(offsets[-1]) != len(data):
        raise CorpusError(f"{directory}: {OFFSETS} does not match {DATA}; build the index again")
    return data, offsets


def read_document(data: mmap.mmap, offsets: npt.NDArray[np.int64], row: int) -> Document:
    if not 0 <= row < len(offsets) - 1:
        raise IndexError(f"row {row} of {len(offsets) - 1} documents")
    try:
        fields = orjson.loads(data[int(offsets[row]) : int(offsets[row + 1])])
        return Document(fields["id"], fields["title"], fields["text"])
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise CorpusError(f"row {row} of the documents is damaged ({error}): build the index again") from None


def id_hash(id: str) -> int:
    """Returns a 64-bit hash of an id. Lookups must also compare the id, because hashes may collide."""
    return int.from_bytes(hashlib.blake2b(id.encode(), digest_size=8).digest(), "little")

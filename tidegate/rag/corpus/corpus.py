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

import numpy as np
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


class Documents:
    """Documents by row, in source order; thread-safe.

    Raises CorpusError if the files do not match.
    """

    def __init__(self, directory: Path) -> None:
        self._offsets = np.memmap(directory / OFFSETS, np.int64, mode="r")
        with (directory / DATA).open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if int(self._offsets[-1]) != len(self._data):
            raise CorpusError(f"{directory}: {OFFSETS} does not match {DATA}; build the index again")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, row: int) -> Document:
        """Returns a document. Raises IndexError for a row outside 0 … n − 1, CorpusError if it is damaged."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)} documents")
        try:
            fields = orjson.loads(self._data[int(self._offsets[row]) : int(self._offsets[row + 1])])
            return Document(fields["id"], fields["title"], fields["text"])
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise CorpusError(
                f"row {row} of the documents is damaged ({error}): build the index again"
            ) from None

    def __iter__(self) -> Iterator[Document]:
        return (self[row] for row in range(len(self)))


class Corpus(Documents):
    """Documents by row and by id. Raises CorpusError if a file is missing or does not match the others."""

    def __init__(self, directory: Path) -> None:
        for name in FILES:
            if not (directory / name).is_file():
                raise CorpusError(f"{directory}: {name} is missing; build the index again")
        super().__init__(directory)
        ids = np.memmap(directory / IDS, np.uint64, mode="r")
        if len(ids) != 2 * len(self):
            raise CorpusError(f"{directory}: {IDS} does not match {OFFSETS}; build the index again")
        self._hashes, self._rows = ids[: len(self)], ids[len(self) :]

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


def id_hash(id: str) -> int:
    """Returns a 64-bit hash of an id. Lookups must also compare the id, because hashes may collide."""
    return int.from_bytes(hashlib.blake2b(id.encode(), digest_size=8).digest(), "little")

"""Converts source files to the files of a corpus; an interrupted run resumes after its last shard."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO

import numpy as np
import orjson

from tidegate.errors import CorpusError
from tidegate.failpoints import reach
from tidegate.rag.corpus.corpus import DATA, IDS, OFFSETS, Corpus, Document
from tidegate.rag.corpus.ids import write_ids
from tidegate.rag.corpus.source import BadRow, SourceRow, locate, read_rows
from tidegate.rag.progress import OnProgress

_SHOWN = 10
"""Number of bad rows listed in an error; the others are only counted."""


def ingest(files: Sequence[Path], directory: Path, shard: int, expected: int, progress: OnProgress) -> Corpus:
    """Writes the files of the corpus, or their missing part, into `directory`.

    `expected` is the approximate number of documents, used for the progress only.

    Raises CorpusError, which lists invalid rows or duplicate ids; rows after the first invalid one are not
    written.
    """
    if not (directory / IDS).is_file():
        _write_documents(files, directory, shard, expected, progress)
        write_ids(directory, partial(locate, files))
    return Corpus.open(directory)


def _write_documents(
    files: Sequence[Path], directory: Path, shard: int, expected: int, progress: OnProgress
) -> None:
    """Appends documents in shards. Offsets are written after their documents are on disk, and commit them."""
    with (directory / DATA).open("ab") as data, (directory / OFFSETS).open("ab") as offsets:
        end, count = _committed(directory, data, offsets)
        rows = read_rows(files, skip=count)
        while documents := _documents(rows, shard):
            lines = [_line(document) for document in documents]
            ends = end + np.cumsum([len(line) for line in lines], dtype=np.int64)
            _append(data, b"".join(lines))
            reach("rag.documents")
            _append(offsets, ends.tobytes())
            reach("rag.offsets")
            end, count = int(ends[-1]), count + len(documents)
            progress(count, max(count + 1, expected))
    progress(count, count)
    if count == 0:
        raise CorpusError(f"{', '.join(map(str, files))}: the source has no documents")


def _committed(directory: Path, data: IO[bytes], offsets: IO[bytes]) -> tuple[int, int]:
    """Truncates partial writes; returns the end of the documents and their number."""
    committed = (directory / OFFSETS).stat().st_size // 8 * 8
    offsets.truncate(committed)
    if committed == 0:
        _append(offsets, np.zeros(1, np.int64).tobytes())
        committed = 8
    end = int(np.fromfile(directory / OFFSETS, np.int64, count=1, offset=committed - 8)[0])
    data.truncate(end)
    return end, committed // 8 - 1


def _documents(rows: Iterator[SourceRow], shard: int) -> list[Document]:
    documents: list[Document] = []
    for row in islice(rows, shard):
        document = row.document()
        if isinstance(document, BadRow):
            raise _error(document, rows)
        documents.append(document)
    return documents


def _error(first: BadRow, rest: Iterable[SourceRow]) -> CorpusError:
    """Reads the rest too, so that the error lists all invalid rows."""
    bad = [first, *(bad_row for row in rest if isinstance(bad_row := row.document(), BadRow))]
    more = f"\n… and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
    shown = "\n".join(map(str, bad[:_SHOWN]))
    return CorpusError(
        f"{len(bad)} {'rows are invalid' if len(bad) > 1 else 'row is invalid'}:\n{shown}{more}"
    )


def _line(document: Document) -> bytes:
    fields = {"id": document.id, "title": document.title, "text": document.text}
    return orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE)


def _append(file: IO[bytes], content: bytes) -> None:
    file.write(content)
    file.flush()
    os.fsync(file.fileno())

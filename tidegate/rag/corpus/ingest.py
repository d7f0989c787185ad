"""Converts source files to the files of a corpus; an interrupted run resumes after its last shard."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt
import orjson

from tidegate.errors import CorpusError
from tidegate.failpoints import reach
from tidegate.progress import OnProgress
from tidegate.rag.corpus.corpus import DATA, IDS, OFFSETS, Corpus, Document, Documents, id_hash
from tidegate.rag.corpus.source import SourceRow, read_rows
from tidegate.rag.files import replace_file

_SHOWN = 10
"""Number of bad rows or ids listed in an error; the others are only counted."""


def ingest(files: Sequence[Path], directory: Path, shard: int, expected: int, progress: OnProgress) -> Corpus:
    """Writes the files of the corpus, or their missing part, into `directory`.

    `expected` is the approximate number of documents, used for the progress only.

    Raises CorpusError, which lists invalid rows or duplicate ids; rows after the first invalid one are not
    written.
    """
    if not (directory / IDS).is_file():
        _write_documents(files, directory, shard, expected, progress)
        _write_ids(files, directory)
    return Corpus(directory)


# -- documents ---------------------------------------------------------------------------------------


def _write_documents(
    files: Sequence[Path], directory: Path, shard: int, expected: int, progress: OnProgress
) -> None:
    """Appends documents in shards. Offsets are written after their documents are on disk, and commit them."""
    with (directory / DATA).open("ab") as data, (directory / OFFSETS).open("ab") as offsets:
        end, count = _committed(directory, data, offsets)
        rows = islice(read_rows(files), count, None)
        while documents := _documents(rows, shard):
            lines = [orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE) for document in documents]
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
    """Returns the next documents. Raises CorpusError, which lists all invalid rows of the source."""
    documents: list[Document] = []
    for row in islice(rows, shard):
        try:
            documents.append(row.document())
        except ValueError:
            bad = list(_faults(chain([row], rows)))
            raise CorpusError(
                f"{len(bad)} {'rows are invalid' if len(bad) > 1 else 'row is invalid'}:\n"
                + _listing(bad[:_SHOWN], len(bad))
            ) from None
    return documents


def _faults(rows: Iterable[SourceRow]) -> Iterator[str]:
    for row in rows:
        try:
            row.document()
        except ValueError as error:
            yield f"{row.where}: {error}"


def _append(file: IO[bytes], content: bytes) -> None:
    file.write(content)
    file.flush()
    os.fsync(file.fileno())


# -- ids ---------------------------------------------------------------------------------------------


def _write_ids(files: Sequence[Path], directory: Path) -> None:
    """Writes the table from ids to rows. Raises CorpusError, which lists duplicate ids."""
    documents = Documents(directory)
    hashes = np.fromiter((id_hash(document.id) for document in documents), np.uint64, len(documents))
    order = np.argsort(hashes, kind="stable").astype(np.uint64)
    hashes = hashes[order]
    rows_by_id: dict[str, list[int]] = defaultdict(list)
    for row in _rows_with_equal_hashes(hashes, order):
        rows_by_id[documents[row].id].append(row)
    duplicates = sorted((rows, id) for id, rows in rows_by_id.items() if len(rows) > 1)
    if duplicates:
        shown = duplicates[:_SHOWN]
        wanted = {row for rows, _ in shown for row in rows}
        where = {number: row.where for number, row in enumerate(read_rows(files)) if number in wanted}
        lines = [f"{id!r}: {'; '.join(where[row] for row in rows)}" for rows, id in shown]
        raise CorpusError(
            f"{len(duplicates)} {'ids occur' if len(duplicates) > 1 else 'id occurs'} more than once; ids"
            f" must be unique:\n{_listing(lines, len(duplicates))}"
        )
    replace_file(directory / IDS, lambda path: np.concatenate([hashes, order]).tofile(path))


def _rows_with_equal_hashes(hashes: npt.NDArray[np.uint64], order: npt.NDArray[np.uint64]) -> list[int]:
    same = hashes[1:] == hashes[:-1]
    rows: list[int] = order[np.append(same, False) | np.insert(same, 0, False)].tolist()
    return rows


def _listing(lines: Sequence[str], count: int) -> str:
    return "\n".join(lines) + (f"\n… and {count - len(lines)} more" if count > len(lines) else "")

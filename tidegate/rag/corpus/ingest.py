"""From a source to a corpus' files, a shard at a time; a killed process goes on after its last shard."""

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
from tidegate.rag.corpus.source import BadRow, SourceRow, places, read_rows
from tidegate.rag.progress import OnProgress

_SHOWN = 10
"""Bad rows that an error lists; the others are counted."""


def ingest(files: Sequence[Path], directory: Path, shard: int, about: int, progress: OnProgress) -> Corpus:
    """Write the corpus' files into `directory`, or what is still missing of them.

    `about`: how many documents are expected, for the progress alone.

    Raises CorpusError that lists the rows that are no documents, and ids that occur twice; nothing after
    the first such row is written.
    """
    if not (directory / IDS).is_file():
        _write_documents(files, directory, shard, about, progress)
        write_ids(directory, partial(places, files))
    return Corpus.open(directory)


def _write_documents(
    files: Sequence[Path], directory: Path, shard: int, about: int, progress: OnProgress
) -> None:
    """The offsets are written after the documents that they bound are on the disk: they are the record."""
    with (directory / DATA).open("ab") as data, (directory / OFFSETS).open("ab") as offsets:
        end, count = _committed(directory, data, offsets)
        rows = read_rows(files, skip=count)
        while documents := _documents(rows, shard):
            lines = [_line(one) for one in documents]
            ends = end + np.cumsum([len(line) for line in lines], dtype=np.int64)
            _append(data, b"".join(lines))
            reach("rag.documents")
            _append(offsets, ends.tobytes())
            reach("rag.offsets")
            end, count = int(ends[-1]), count + len(documents)
            progress(count, max(count + 1, about))
    progress(count, count)
    if count == 0:
        raise CorpusError(f"{', '.join(map(str, files))}: there is no document in it")


def _committed(directory: Path, data: IO[bytes], offsets: IO[bytes]) -> tuple[int, int]:
    """Where the documents end, and how many there are, after cutting off what was half written."""
    whole = (directory / OFFSETS).stat().st_size // 8 * 8
    offsets.truncate(whole)
    if whole == 0:
        _append(offsets, np.zeros(1, np.int64).tobytes())
        whole = 8
    end = int(np.fromfile(directory / OFFSETS, np.int64, count=1, offset=whole - 8)[0])
    data.truncate(end)
    return end, whole // 8 - 1


def _documents(rows: Iterator[SourceRow], shard: int) -> list[Document]:
    documents: list[Document] = []
    for row in islice(rows, shard):
        document = row.document()
        if isinstance(document, BadRow):
            raise _refusal(document, rows)
        documents.append(document)
    return documents


def _refusal(first: BadRow, rest: Iterable[SourceRow]) -> CorpusError:
    """The rest is read too: all that is wrong can be put right at once."""
    bad = [first, *(one for row in rest if isinstance(one := row.document(), BadRow))]
    more = f"\n… and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
    shown = "\n".join(map(str, bad[:_SHOWN]))
    return CorpusError(f"{len(bad)} {'rows are' if len(bad) > 1 else 'row is'} no document:\n{shown}{more}")


def _line(document: Document) -> bytes:
    fields = {"id": document.id, "title": document.title, "text": document.text}
    return orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE)


def _append(file: IO[bytes], content: bytes) -> None:
    file.write(content)
    file.flush()
    os.fsync(file.fileno())

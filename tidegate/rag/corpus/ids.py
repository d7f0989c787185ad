"""Builds the table from ids to rows, and detects duplicate ids."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tidegate.errors import CorpusError
from tidegate.rag.corpus.corpus import IDS, id_hash, open_documents, read_document
from tidegate.rag.files import replace_file

_SHOWN = 10

Locate = Callable[[Sequence[int]], Mapping[int, str]]


def write_ids(directory: Path, locate: Locate) -> None:
    """Writes `documents.ids`. `locate` returns the source locations of rows, for the error message.

    Raises CorpusError, which lists duplicate ids.
    """
    data, offsets = open_documents(directory)
    hashes = np.empty(len(offsets) - 1, np.uint64)
    for row in range(len(hashes)):
        hashes[row] = id_hash(read_document(data, offsets, row).id)
    order = np.argsort(hashes, kind="stable").astype(np.uint64)
    hashes = hashes[order]
    duplicates: list[tuple[str, list[int]]] = []
    for rows in _equal_hashes(hashes, order):
        by_id = defaultdict(list)
        for row in rows:
            by_id[read_document(data, offsets, row).id].append(row)
        duplicates += [(id, same) for id, same in by_id.items() if len(same) > 1]
    if duplicates:
        raise _error(sorted(duplicates, key=lambda duplicate: duplicate[1]), locate)
    replace_file(directory / IDS, lambda path: np.concatenate([hashes, order]).tofile(path))


def _equal_hashes(hashes: npt.NDArray[np.uint64], order: npt.NDArray[np.uint64]) -> list[list[int]]:
    """Returns the rows of each hash that occurs more than once."""
    same = np.flatnonzero(hashes[1:] == hashes[:-1])
    runs = np.split(same, np.flatnonzero(np.diff(same) > 1) + 1) if len(same) else []
    return [[int(order[at]) for at in range(int(run[0]), int(run[-1]) + 2)] for run in runs]


def _error(duplicates: Sequence[tuple[str, list[int]]], locate: Locate) -> CorpusError:
    shown = duplicates[:_SHOWN]
    where = locate([row for _, rows in shown for row in rows])
    lines = [f"{id!r}: {'; '.join(where[row] for row in rows)}" for id, rows in shown]
    more = f"\n… and {len(duplicates) - _SHOWN} more" if len(duplicates) > _SHOWN else ""
    return CorpusError(
        f"{len(duplicates)} {'ids occur' if len(duplicates) > 1 else 'id occurs'} more than once; ids must"
        " be unique:\n" + "\n".join(lines) + more
    )

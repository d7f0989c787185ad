"""The table that finds an id's row; made once all documents are there, it also finds ids that occur twice."""

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

Places = Callable[[Sequence[int]], Mapping[int, str]]


def write_ids(directory: Path, places: Places) -> None:
    """Write `documents.ids`. `places` tells where rows came from, for the error.

    Raises CorpusError that lists the ids that occur twice.
    """
    data, offsets = open_documents(directory)
    hashes = np.empty(len(offsets) - 1, np.uint64)
    for row in range(len(hashes)):
        hashes[row] = id_hash(read_document(data, offsets, row).id)
    order = np.argsort(hashes, kind="stable").astype(np.uint64)
    hashes = hashes[order]
    twice: list[tuple[str, list[int]]] = []
    for rows in _alike(hashes, order):
        by_id = defaultdict(list)
        for row in rows:
            by_id[read_document(data, offsets, row).id].append(row)
        twice += [(id, same) for id, same in by_id.items() if len(same) > 1]
    if twice:
        raise _refusal(sorted(twice, key=lambda one: one[1]), places)
    replace_file(directory / IDS, lambda path: np.concatenate([hashes, order]).tofile(path))


def _alike(hashes: npt.NDArray[np.uint64], order: npt.NDArray[np.uint64]) -> list[list[int]]:
    """The rows of each hash that several ids have."""
    same = np.flatnonzero(hashes[1:] == hashes[:-1])
    runs = np.split(same, np.flatnonzero(np.diff(same) > 1) + 1) if len(same) else []
    return [[int(order[at]) for at in range(int(run[0]), int(run[-1]) + 2)] for run in runs]


def _refusal(twice: Sequence[tuple[str, list[int]]], places: Places) -> CorpusError:
    shown = twice[:_SHOWN]
    where = places([row for _, rows in shown for row in rows])
    lines = [f"{id!r}: {'; '.join(where[row] for row in rows)}" for id, rows in shown]
    more = f"\n… and {len(twice) - _SHOWN} more" if len(twice) > _SHOWN else ""
    return CorpusError(
        f"{len(twice)} {'ids occur' if len(twice) > 1 else 'id occurs'} more than once, where ids must tell"
        " documents apart:\n" + "\n".join(lines) + more
    )

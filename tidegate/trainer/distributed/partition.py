"""Partitions the rows of a batch over the trainer's ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tidegate.trainer.batch.microbatch import split_by_length
from tidegate.trainer.batch.rows import TrainSequence


@dataclass(slots=True)
class RankBatch:
    """A rank's microbatch in one forward pass; it may be empty."""

    rows: list[int]
    """Indices of the rows in the batch."""
    positions: int = 0
    """Inputs with padding."""
    tokens: int = 0
    """Inputs without padding."""


def partition_rows(rows: Sequence[TrainSequence], ranks: int, max_tokens: int) -> list[list[RankBatch]]:
    """Assign rows to ranks; returns each rank's batches, of which all ranks have the same number.

    Sharded ranks compute layer by layer in lockstep, so each pass must be of similar size on all ranks, not
    only the sum. Rows are therefore assigned in descending order of length, one to each rank in alternating
    direction, and all ranks split them at the same places. A batch has at most `max_tokens` positions, unless
    a single row is longer. Rows without a trained token are left out. Deterministic on every rank.
    """
    usable = [index for index, row in enumerate(rows) if row.mask.any()]
    lengths = {index: rows[index].inputs for index in usable}
    order = sorted(usable, key=lambda index: (-lengths[index], index))
    rounds = [order[start : start + ranks] for start in range(0, len(order), ranks)]
    batches: list[list[RankBatch]] = [[] for _ in range(ranks)]
    for start, end in split_by_length([lengths[indices[0]] for indices in rounds], max_tokens):
        assigned: list[list[int]] = [[] for _ in range(ranks)]
        for number in range(start, end):
            for at, index in enumerate(rounds[number]):
                assigned[at if number % 2 == 0 else ranks - 1 - at].append(index)
        for rank, indices in enumerate(assigned):
            inputs = [lengths[index] for index in indices]
            batches[rank].append(RankBatch(indices, len(inputs) * max(inputs, default=0), sum(inputs)))
    return batches

"""Splits the rows of an optimiser step into the shares of the trainer's ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tidegate.trainer.batch.packing import split_by_length
from tidegate.trainer.batch.rows import TrainingSequence


@dataclass(frozen=True, slots=True)
class RankShare:
    """The rows of an optimiser step, or of a streamed part of it, that one rank computes.

    Rank 0 sends it to the rank: it holds no other row, and of all ranks' rows only what every rank needs.
    """

    rows: list[TrainingSequence]
    groups: frozenset[str]
    """Ids of the groups of all ranks' rows."""
    tokens: int
    """Trained tokens of all ranks' rows."""
    denominator: float
    """The loss's N, of all ranks' rows."""
    passes: list[int] = field(default_factory=list)
    """Number of rows in each forward pass, in the order of `rows`: as many passes on every rank, some without
    rows. Not set on a single rank."""


def split_share(whole: RankShare, ranks: int, max_tokens: int) -> list[RankShare]:
    """Split a share that holds all rows; returns each rank's."""
    return [
        replace(
            whole,
            rows=[whole.rows[index] for indices in passes for index in indices],
            passes=[len(indices) for indices in passes],
        )
        for passes in partition_rows(whole.rows, ranks, max_tokens)
    ]


def partition_rows(rows: Sequence[TrainingSequence], ranks: int, max_tokens: int) -> list[list[list[int]]]:
    """Assign rows to ranks; returns the indices of the rows in each pass of each rank.

    All ranks have equally many passes, some perhaps without rows. Sharded ranks compute layer by layer in
    lockstep, so each pass must be of similar size on all ranks, not only the sum. Rows are therefore
    assigned in descending order of length, one to each rank in alternating direction, and all ranks split
    them at the same places. A pass has at most `max_tokens` positions, unless a single row is longer. Rows
    without a trained token are left out. Deterministic.
    """
    usable = [index for index, row in enumerate(rows) if row.mask.any()]
    lengths = {index: rows[index].inputs for index in usable}
    order = sorted(usable, key=lambda index: (-lengths[index], index))
    rounds = [order[start : start + ranks] for start in range(0, len(order), ranks)]
    passes: list[list[list[int]]] = [[] for _ in range(ranks)]
    for start, end in split_by_length([lengths[indices[0]] for indices in rounds], max_tokens):
        assigned: list[list[int]] = [[] for _ in range(ranks)]
        for number in range(start, end):
            for at, index in enumerate(rounds[number]):
                # In alternating direction, so that no rank gets the longest row of every round.
                assigned[at if number % 2 == 0 else ranks - 1 - at].append(index)
        for rank, indices in enumerate(assigned):
            passes[rank].append(indices)
    return passes

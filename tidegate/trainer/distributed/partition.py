"""Dealing rows out to the ranks that train together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tidegate.trainer.batch.rows import TrainSequence
from tidegate.trainer.policy.microbatch import fine_cuts


@dataclass(slots=True)
class RankBatch:
    """What one rank computes in one pass: a microbatch of whole rows, or nothing."""

    rows: list[int]
    """Which rows of the batch."""
    positions: int = 0
    """Inputs with padding."""
    tokens: int = 0
    """Inputs without padding."""


def partition_rows(rows: Sequence[TrainSequence], ranks: int, max_tokens: int) -> list[list[RankBatch]]:
    """The hands of each rank, in order; all ranks have as many.

    Sharded ranks go through the model in step, layer by layer, so that it is not the sum of a rank's tokens
    that has to be like the others' but each of its passes. So rows are dealt in descending order of length,
    one to each rank by turns (there and back, lest the first always got the longest), and all make the same
    cuts. A hand is at most `max_tokens` positions, unless one row alone is longer. Rows without a trained
    token are left out. The same rows are dealt the same way on every rank.
    """
    usable = [index for index, row in enumerate(rows) if row.mask.any()]
    lengths = {index: rows[index].inputs for index in usable}
    order = sorted(usable, key=lambda index: (-lengths[index], index))
    turns = [order[start : start + ranks] for start in range(0, len(order), ranks)]
    dealt: list[list[RankBatch]] = [[] for _ in range(ranks)]
    for start, end in fine_cuts([lengths[turn[0]] for turn in turns], max_tokens):
        hands: list[list[int]] = [[] for _ in range(ranks)]
        for number in range(start, end):
            for at, index in enumerate(turns[number]):
                hands[at if number % 2 == 0 else ranks - 1 - at].append(index)
        for rank, hand in enumerate(hands):
            inputs = [lengths[index] for index in hand]
            dealt[rank].append(RankBatch(hand, len(inputs) * max(inputs, default=0), sum(inputs)))
    return dealt

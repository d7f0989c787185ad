"""Reciprocal rank fusion, which combines rankings by rank and ignores scores."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

Ranking = Sequence[tuple[int, float]]
"""(row, score), best first."""

OFFSET = 60
"""Constant of reciprocal rank fusion (Cormack, Clarke and Büttcher, 2009); larger: flatter weights."""
DEPTH = 100
"""Minimum depth of each ranking."""


def fuse(rankings: Iterable[Ranking], k: int) -> list[tuple[int, float]]:
    """Returns the k best rows by the sum of 1 ÷ (OFFSET + rank) over the rankings that contain them.

    Equal sums are ordered by row, so that results are deterministic.
    """
    sums: dict[int, float] = defaultdict(float)
    for ranking in rankings:
        for rank, (row, _) in enumerate(ranking, 1):
            sums[row] += 1.0 / (OFFSET + rank)
    return sorted(sums.items(), key=lambda item: (-item[1], item[0]))[:k]

"""Several rankings made one, by rank alone: their scores need not compare."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

Ranking = Sequence[tuple[int, float]]
"""(row, score), best first."""

OFFSET = 60
"""Of reciprocal rank fusion (Cormack, Clarke and Büttcher, 2009): how little the first rank stands out."""
DEPTH = 100
"""How deep each ranking is looked into, at least."""


def fuse(rankings: Iterable[Ranking], k: int) -> list[tuple[int, float]]:
    """The k best rows by the sum of 1 ÷ (OFFSET + rank) over the rankings that hold them.

    Equal sums are ordered by row, so that an answer does not depend on chance.
    """
    sums: dict[int, float] = defaultdict(float)
    for ranking in rankings:
        for rank, (row, _) in enumerate(ranking, 1):
            sums[row] += 1.0 / (OFFSET + rank)
    return sorted(sums.items(), key=lambda one: (-one[1], one[0]))[:k]

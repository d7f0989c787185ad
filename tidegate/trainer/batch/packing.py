"""Chooses the rows of each microbatch: with shared prefixes, and with little padding."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cmp_to_key

import numpy as np

from tidegate.trainer.batch.microbatch import Microbatch, PrefixBatch, microbatch, shared_prefixes
from tidegate.trainer.batch.rows import TrainingSequence

MICROBATCH_OVERHEAD = 64
"""Fixed cost of a forward and backward pass, in padded tokens. Measured for a model of 1M parameters on a
CPU."""


MAX_PADDING_RATIO = 0.05
"""Largest share of padding in the computed positions, whatever the cost of more passes."""


MIN_SAVED_SHARE = 0.15
"""Smallest share of their inputs that rows must save to share a prefix: on a CPU, attention with one needs a
mask, which costs more than plain causal attention."""


MIN_SAVED_TOKENS = 16
"""Rows must also save more tokens than this."""


PREFIX_MEMORY_DIVISOR = 8
"""Memory of a computed token's activations, relative to that of its keys and values."""


@dataclass(slots=True)
class _Cluster:
    """Rows (by index in the batch) whose first `shared` tokens are equal."""

    rows: list[int]
    shared: int


def prefix_batches(
    rows: Sequence[TrainingSequence], max_tokens: int, *, share: bool = True, one_length: bool = False
) -> list[PrefixBatch]:
    """Group rows into microbatches with shared prefixes and little padding. Deterministic.

    Rows without a trained token are left out.

    Args:
        rows: rows of the batch.
        max_tokens: limit on the padded tokens of a microbatch, and on the prefixes of a PrefixBatch. A longer
            row or prefix is processed alone.
        share: compute common prefixes, such as the prompt of a group's episodes, once.
        one_length: the prefixes of each microbatch have the same length.
    """
    usable = [index for index, row in enumerate(rows) if row.mask.any()]
    clusters = _clusters(rows, usable) if share else []
    sharing = {index for cluster in clusters for index in cluster.rows}
    alone = [index for index in usable if index not in sharing]
    result = [PrefixBatch([], microbatches(rows, alone, max_tokens))] if alone else []
    filling: list[_Cluster] = []
    # Longest first, as `split_by_length` needs them.
    for cluster in sorted(clusters, key=lambda cluster: (-cluster.shared, cluster.rows)):
        if filling and sum(other.shared for other in filling) + cluster.shared > max_tokens:
            result.append(_prefix_batch(rows, filling, max_tokens, one_length=one_length))
            filling = []
        filling.append(cluster)
    return [*result, _prefix_batch(rows, filling, max_tokens, one_length=one_length)] if filling else result


def microbatches(
    rows: Sequence[TrainingSequence],
    chosen: Sequence[int],
    max_tokens: int,
    *,
    prefixes: Mapping[int, tuple[int, int]] | None = None,
    overhead: int = MICROBATCH_OVERHEAD,
    max_padding: float = MAX_PADDING_RATIO,
) -> list[Microbatch]:
    """Group the chosen rows into microbatches of at most `max_tokens` padded tokens, longest first.

    Rows are sorted by length and split where padding + `overhead` per microbatch is least (exact, by dynamic
    programming), or finer if more than `max_padding` of the positions would be padding.

    Args:
        rows: rows of the batch.
        chosen: indices of the rows to use.
        max_tokens: limit on the padded tokens of a microbatch.
        prefixes: (index, length) of each row's prefix, by row index.
        overhead: fixed cost of a microbatch, in padded tokens.
        max_padding: largest share of padding.
    """
    prefixes = prefixes or {}
    lengths = {index: rows[index].inputs - prefixes.get(index, (0, 0))[1] for index in chosen}
    # The index decides between equal lengths, so that a replay sums in the same order.
    order = sorted(chosen, key=lambda index: (-lengths[index], index))
    # A prefix is not recomputed, but its keys and values are copied for every row.
    margin = max((prefixes.get(index, (0, 0))[1] for index in chosen), default=0) // PREFIX_MEMORY_DIVISOR
    splits = split_by_length([lengths[index] for index in order], max_tokens, overhead, margin, max_padding)
    return [microbatch(rows, order[start:end], prefixes) for start, end in splits]


def _clusters(rows: Sequence[TrainingSequence], usable: Sequence[int]) -> list[_Cluster]:
    """Cluster rows with long common prefixes, among neighbours in lexicographic order.

    A row joins the last cluster if that saves more tokens than leaving it out.
    """

    def compare(one: int, other: int) -> int:
        return _compare(rows[one], rows[other])

    order = sorted(usable, key=cmp_to_key(compare))
    clusters: list[_Cluster] = []
    for index in order:
        last = clusters[-1] if clusters else None
        shared = min(last.shared, _common_prefix(rows[last.rows[-1]], rows[index])) if last else 0
        if last and len(last.rows) * shared > (len(last.rows) - 1) * last.shared:
            last.rows.append(index)
            last.shared = shared
        else:
            clusters.append(_Cluster([index], _max_prefix(rows[index])))
    return [cluster for cluster in clusters if _worth_sharing(rows, cluster)]


def _compare(one: TrainingSequence, other: TrainingSequence) -> int:
    """Compare rows by ids and experts; those with equal beginnings are neighbours in this order.

    Keys for a sort would be another copy of all experts.
    """
    length = min(len(one.ids), len(other.ids))
    equal = _equal_beginning(one, other, length)
    if equal == length:
        return len(one.ids) - len(other.ids)
    values = [(row.ids[equal], *(() if row.experts is None else row.experts[equal])) for row in (one, other)]
    return -1 if values[0] < values[1] else 1


def _worth_sharing(rows: Sequence[TrainingSequence], cluster: _Cluster) -> bool:
    saved = (len(cluster.rows) - 1) * cluster.shared
    return saved > MIN_SAVED_TOKENS and saved >= MIN_SAVED_SHARE * sum(
        rows[index].inputs for index in cluster.rows
    )


def _max_prefix(row: TrainingSequence) -> int:
    """Return a row's longest possible prefix, which ends before the first trained token is predicted."""
    return max(0, int(np.flatnonzero(row.mask)[0]) - 1)


def _common_prefix(other: TrainingSequence, row: TrainingSequence) -> int:
    """Return the length of the common prefix of two rows, at most `_max_prefix(row)`."""
    return _equal_beginning(other, row, min(len(other.ids), _max_prefix(row)))


def _equal_beginning(other: TrainingSequence, row: TrainingSequence, length: int) -> int:
    """Return how many of the first `length` tokens are equal; those of different experts are different."""
    unlike = other.ids[:length] != row.ids[:length]
    if other.experts is not None and row.experts is not None:
        unlike |= (other.experts[:length] != row.experts[:length]).any(axis=1)
    different = np.flatnonzero(unlike)
    return int(different[0]) if len(different) else length


def _prefix_batch(
    rows: Sequence[TrainingSequence], clusters: Sequence[_Cluster], max_tokens: int, *, one_length: bool
) -> PrefixBatch:
    """Build prefixes and microbatches from clusters in descending order of shared tokens."""
    prefix_of = {
        index: (number, cluster.shared) for number, cluster in enumerate(clusters) for index in cluster.rows
    }
    prefixes = []
    for start, end in split_by_length([cluster.shared for cluster in clusters], max_tokens):
        first = [rows[cluster.rows[0]] for cluster in clusters[start:end]]
        prefixes.append(shared_prefixes(first, [cluster.shared for cluster in clusters[start:end]]))
    runs = itertools.groupby(clusters, key=lambda cluster: cluster.shared if one_length else None)
    together = [[index for cluster in run for index in cluster.rows] for _, run in runs]
    return PrefixBatch(
        prefixes,
        [one for run in together for one in microbatches(rows, sorted(run), max_tokens, prefixes=prefix_of)],
    )


def split_by_length(
    lengths: Sequence[int],
    max_tokens: int,
    overhead: int = MICROBATCH_OVERHEAD,
    margin: int = 0,
    max_padding: float = MAX_PADDING_RATIO,
) -> list[tuple[int, int]]:
    """Split descending lengths into runs (start, end) at least cost, with at most `max_padding` padding.

    `overhead` is the cost of a run; it is halved until the padding is small enough.
    """
    while True:
        splits = _cheapest_split(lengths, max_tokens, overhead, margin)
        computed = sum((end - start) * lengths[start] for start, end in splits)
        if not overhead or computed - sum(lengths) <= max_padding * computed:
            return splits
        overhead //= 2


def _cheapest_split(
    lengths: Sequence[int], max_tokens: int, overhead: int, margin: int = 0
) -> list[tuple[int, int]]:
    """Split descending lengths into the cheapest runs (start, end); a run costs overhead + rows · longest."""
    count = len(lengths)
    cost = np.full(count + 1, np.iinfo(np.int64).max, dtype=np.int64)
    cost[0] = 0
    back = np.zeros(count + 1, dtype=np.int64)
    for start, longest in enumerate(lengths):
        size = min(count - start, max(1, max_tokens // max(1, longest + margin)))
        tried = cost[start] + overhead + longest * np.arange(1, size + 1)
        ends = slice(start + 1, start + size + 1)
        better = tried < cost[ends]
        cost[ends][better] = tried[better]
        back[ends][better] = start
    splits = []
    end = count
    while end:
        splits.append((int(back[end]), end))
        end = int(back[end])
    return splits[::-1]

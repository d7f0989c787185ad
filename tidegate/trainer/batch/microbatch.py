"""Groups rows into microbatches with shared prefixes and little padding.

Axes in names: b rows of a microbatch, p prefixes, t positions, n trained tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tidegate.trainer.batch.rows import TrainingSequence

MICROBATCH_OVERHEAD = 64
"""Fixed cost of a forward and backward pass, in padded tokens. Measured for a model of 1M parameters on a
CPU."""
MAX_PADDING_RATIO = 0.05
"""Largest share of padding in the computed positions, whatever the cost of more passes."""
MIN_SAVED_SHARE = 0.15
"""Smallest share of their inputs that rows must save to share a prefix: attention with a prefix needs a mask,
which costs more than plain causal attention."""
MIN_SAVED_TOKENS = 16
"""Rows must also save more tokens than this."""
PREFIX_MEMORY_DIVISOR = 8
"""Memory of a computed token's activations, relative to that of its keys and values."""


class ForwardPass(NamedTuple):
    """Size of the input of one pass through the model."""

    positions: int
    """Inputs with padding."""
    tokens: int
    """Inputs without padding."""


@dataclass(slots=True)
class Microbatch:
    """Right-padded rows of one forward pass, with their trained tokens concatenated.

    A row's inputs begin where its prefix ends (at 0 without one) and end before its last trained token, so
    that shared or unneeded positions are not computed.
    """

    rows: list[int]
    """Indices of the rows in the batch, in the order of b."""
    ids_bt: Tensor
    """int64, padded on the right with 0, which causal attention never sees."""
    positions_bt: Tensor
    """int64, positions of the inputs in their rows."""
    lengths_b: Tensor
    """int64, number of inputs of each row, without padding."""
    prefix_b: Tensor
    """int64, index of the row's prefix in the PrefixBatch; 0 without prefixes."""
    starts_b: Tensor
    """int64, the length of that prefix."""
    prefix_width: int
    """Length of the longest prefix; 0: no prefix is shared."""
    at_n: Tensor
    """int64, index in the flattened ids_bt at which the token is predicted: one before its own position."""
    _: KW_ONLY
    row_n: Tensor
    """int64, the row in b that the token belongs to."""
    targets_n: Tensor
    """int64, the id of the token."""
    logprobs_n: Tensor
    """float32, log μ: the logprob with which the engine sampled the token."""
    versions_n: Tensor
    """int64, the policy version that sampled the token."""
    advantages_n: Tensor
    """float32, the token's advantage."""
    temperatures_n: Tensor
    """float32, the temperature at which the token was sampled."""
    weights_n: Tensor
    """float32, the factor of the token's row in the loss."""
    old_n: Tensor | None = None
    """log π_old, of the policy at the start of the batch; None with one step per batch: π_old is π_θ."""
    reference_n: Tensor | None = None
    """log π_ref; None without a reference model."""
    teacher_n: Tensor | None = None
    """log p_teacher; None without a teacher."""
    teacher_ids_nk: Tensor | None = None
    """int64, the k likeliest ids of the teacher; None unless `trainer.teacher.form` is `distribution`."""
    teacher_top_nk: Tensor | None = None
    """float32, log p_teacher of these ids."""
    policy_top_nk: Tensor | None = None
    """log π_θ of these ids, with gradient; set by the forward pass."""
    sampler_ids_nk: Tensor | None = None
    """int64, the k likeliest ids of the engine that sampled the token; None without score centering."""
    sampler_listed_nk: Tensor | None = None
    """float32, log μ of these ids."""
    policy_listed_nk: Tensor | None = None
    """log π_θ of these ids, with gradient; set by the forward pass."""
    kept_nm: Tensor | None = None
    """int64, the ids that top-p, top-k and min-p kept, padded on the right with −1, which fills the row of a
    token that was drawn from the whole vocabulary; None if all tokens were."""
    experts_btm: Tensor | None = None
    """int32, the experts of the inputs, [b, t, layers · k]; None without routing replay."""
    idle: bool = False
    """Dummy microbatch that keeps the ranks in step: its loss is 0, and no metric includes it."""

    @property
    def other_ids_nk(self) -> Tensor | None:
        """The ids beside the target whose log π_θ is needed: the teacher's, the sampler's, the kept ones."""
        kept_nm = None if self.kept_nm is None else self.kept_nm.clamp(min=0)
        every = (self.teacher_ids_nk, self.sampler_ids_nk, kept_nm)
        given = [ids_nk for ids_nk in every if ids_nk is not None]
        return torch.cat(given, dim=1) if given else None

    def with_others(self, policy_nk: Tensor | None) -> Self:
        """Return the microbatch with log π_θ of the teacher's and the sampler's ids."""
        if policy_nk is None:
            return self
        teachers = 0 if self.teacher_ids_nk is None else self.teacher_ids_nk.shape[1]
        return replace(self, policy_top_nk=policy_nk[:, :teachers], policy_listed_nk=policy_nk[:, teachers:])

    def old_logprobs(self, logprobs_n: Tensor) -> Tensor:
        """Return log π_old, given log π_θ; constant, [n]."""
        return logprobs_n.detach() if self.old_n is None else self.old_n

    @property
    def positions(self) -> int:
        return self.ids_bt.numel()

    @property
    def tokens(self) -> int:
        return int(self.lengths_b.sum())

    def to(self, device: torch.device) -> Self:
        """Return the microbatch on another device, or itself if it is there already."""
        if self.ids_bt.device == device:
            return self
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors: dict[str, Any] = {
            name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)
        }
        return replace(self, **tensors)


@dataclass(slots=True)
class SharedPrefixes:
    """Prefixes shared by several rows, right-padded; each is computed once."""

    ids_pt: Tensor
    lengths_p: Tensor
    experts_ptm: Tensor | None = None
    """int32, the experts of these tokens, [p, t, layers · k]; None without routing replay."""

    @property
    def positions(self) -> int:
        return self.ids_pt.numel()

    @property
    def tokens(self) -> int:
        return int(self.lengths_p.sum())


@dataclass(slots=True)
class PrefixBatch:
    """Microbatches with the prefixes that they share; without prefixes, their rows are complete."""

    prefixes: list[SharedPrefixes]
    microbatches: list[Microbatch]

    @property
    def passes(self) -> list[ForwardPass]:
        """All forward passes, without idle ones."""
        computed: list[SharedPrefixes | Microbatch] = [*self.prefixes]
        computed += [batch for batch in self.microbatches if not batch.idle]
        return [ForwardPass(batch.positions, batch.tokens) for batch in computed]


@dataclass(slots=True)
class _Cluster:
    """Rows (by index in the batch) whose first `shared` tokens are equal."""

    rows: list[int]
    shared: int


def prefix_batches(
    rows: Sequence[TrainingSequence], max_tokens: int, *, share: bool = True
) -> list[PrefixBatch]:
    """Group rows into microbatches with shared prefixes and little padding. Deterministic.

    Rows without a trained token are left out.

    Args:
        rows: rows of the batch.
        max_tokens: limit on the padded tokens of a microbatch, and on the prefixes of a PrefixBatch. A longer
            row or prefix is processed alone.
        share: compute common prefixes, such as the prompt of a group's episodes, once.
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
            result.append(_prefix_batch(rows, filling, max_tokens))
            filling = []
        filling.append(cluster)
    return [*result, _prefix_batch(rows, filling, max_tokens)] if filling else result


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
    margin = max((length for _, length in prefixes.values()), default=0) // PREFIX_MEMORY_DIVISOR
    splits = split_by_length([lengths[index] for index in order], max_tokens, overhead, margin, max_padding)
    return [microbatch(rows, order[start:end], prefixes) for start, end in splits]


def padding_ratio(passes: Iterable[ForwardPass]) -> float:
    """Return the share of padding in the computed positions, 0 ≤ ratio < 1; 0 without passes."""
    sizes = [(forward_pass.positions, forward_pass.tokens) for forward_pass in passes]
    computed = sum(positions for positions, _ in sizes)
    return 1.0 - sum(tokens for _, tokens in sizes) / computed if computed else 0.0


def _clusters(rows: Sequence[TrainingSequence], usable: Sequence[int]) -> list[_Cluster]:
    """Cluster rows with long common prefixes, among neighbours in lexicographic order.

    A row joins the last cluster if that saves more tokens than leaving it out.
    """
    order = sorted(usable, key=lambda index: _order(rows[index]))
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


def _order(row: TrainingSequence) -> bytes:
    """Return a key by which rows with equal beginnings are neighbours."""
    # Big-endian: only then are bytes in the order of the ids.
    tokens = row.ids.astype(">i4")
    if row.experts is None:
        return tokens.tobytes()
    return np.column_stack([tokens, row.experts.astype(">i4")]).astype(">i4").tobytes()


def _worth_sharing(rows: Sequence[TrainingSequence], cluster: _Cluster) -> bool:
    saved = (len(cluster.rows) - 1) * cluster.shared
    return saved > MIN_SAVED_TOKENS and saved >= MIN_SAVED_SHARE * sum(
        rows[index].inputs for index in cluster.rows
    )


def _max_prefix(row: TrainingSequence) -> int:
    """Return a row's longest possible prefix, which ends before the first trained token is predicted."""
    return max(0, int(np.flatnonzero(row.mask)[0]) - 1)


def _common_prefix(other: TrainingSequence, row: TrainingSequence) -> int:
    """Return the length of the common prefix of two rows, at most `_max_prefix(row)`.

    Tokens that are computed by different experts are different.
    """
    length = min(len(other.ids), _max_prefix(row))
    unlike = other.ids[:length] != row.ids[:length]
    if other.experts is not None and row.experts is not None:
        unlike |= (other.experts[:length] != row.experts[:length]).any(axis=1)
    different = np.flatnonzero(unlike)
    return int(different[0]) if len(different) else length


def _prefix_batch(
    rows: Sequence[TrainingSequence], clusters: Sequence[_Cluster], max_tokens: int
) -> PrefixBatch:
    """Build prefixes and microbatches from clusters in descending order of shared tokens."""
    prefix_of = {
        index: (number, cluster.shared) for number, cluster in enumerate(clusters) for index in cluster.rows
    }
    prefixes = []
    for start, end in split_by_length([cluster.shared for cluster in clusters], max_tokens):
        first = [rows[cluster.rows[0]] for cluster in clusters[start:end]]
        lengths = [cluster.shared for cluster in clusters[start:end]]
        experts = _experts(first, [0] * len(first), lengths)
        ids = [row.ids[:length] for row, length in zip(first, lengths, strict=True)]
        prefixes.append(SharedPrefixes(_padded(ids), torch.tensor(lengths), experts))
    return PrefixBatch(prefixes, microbatches(rows, sorted(prefix_of), max_tokens, prefixes=prefix_of))


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


def _padded(sequences: Sequence[npt.NDArray[Any]], dtype: type = np.int64) -> Tensor:
    """Pad on the right with 0: [sequences, longest, …]."""
    longest = max(map(len, sequences))
    padded = np.zeros((len(sequences), longest, *sequences[0].shape[1:]), dtype)
    for at, values in enumerate(sequences):
        padded[at, : len(values)] = values
    return torch.from_numpy(padded)


def _experts(rows: Sequence[TrainingSequence], starts: Sequence[int], ends: Sequence[int]) -> Tensor | None:
    """Return the experts of the rows' tokens `start..end`, padded; None if a row has none."""
    found = [
        row.experts[start:end]
        for row, start, end in zip(rows, starts, ends, strict=True)
        if row.experts is not None
    ]
    return _padded(found, np.int32) if len(found) == len(rows) else None


def microbatch(
    rows: Sequence[TrainingSequence], chosen: list[int], prefixes: Mapping[int, tuple[int, int]]
) -> Microbatch:
    """Build one microbatch of the chosen rows; `prefixes` gives (index, length) of a row's prefix."""
    selected = [rows[index] for index in chosen]
    numbers, starts = zip(*(prefixes.get(index, (0, 0)) for index in chosen), strict=True)
    inputs = [row.ids[start : row.inputs] for row, start in zip(selected, starts, strict=True)]
    ids_bt = _padded(inputs)
    width = ids_bt.shape[1]
    starts_b = torch.tensor(starts)
    trained = [np.flatnonzero(row.mask) for row in selected]
    counts = [len(positions) for positions in trained]

    def concatenated(name: str) -> Tensor:
        arrays = [getattr(row, name)[positions] for row, positions in zip(selected, trained, strict=True)]
        if arrays[0].ndim > 1:  # likeliest ids come first: fewer of them are the likeliest, too
            arrays = [array[:, : min(one.shape[1] for one in arrays)] for array in arrays]
        return torch.from_numpy(np.concatenate(arrays))

    def optional(name: str) -> Tensor | None:
        return None if any(getattr(row, name) is None for row in selected) else concatenated(name)

    at_n = [at * width + positions - 1 - starts[at] for at, positions in enumerate(trained)]
    teacher_ids, sampler_ids, listed = map(optional, ("teacher_ids", "sampler_ids", "sampler_listed"))
    return Microbatch(
        rows=chosen,
        ids_bt=ids_bt,
        positions_bt=starts_b[:, None] + torch.arange(width),
        lengths_b=torch.tensor([len(ids) for ids in inputs]),
        prefix_b=torch.tensor(numbers),
        starts_b=starts_b,
        prefix_width=max(starts),
        at_n=torch.from_numpy(np.concatenate(at_n)),
        row_n=torch.from_numpy(np.repeat(np.arange(len(selected)), counts)),
        targets_n=concatenated("ids").long(),
        logprobs_n=concatenated("logprobs"),
        versions_n=concatenated("versions"),
        advantages_n=concatenated("advantages"),
        temperatures_n=concatenated("temperature"),
        weights_n=torch.from_numpy(np.repeat(np.array([row.weight for row in selected], np.float32), counts)),
        old_n=optional("old"),
        reference_n=optional("reference"),
        teacher_n=optional("teacher"),
        teacher_ids_nk=None if teacher_ids is None else teacher_ids.long(),
        teacher_top_nk=optional("teacher_top"),
        sampler_ids_nk=None if sampler_ids is None else sampler_ids.long(),
        sampler_listed_nk=None if listed is None else listed.float(),
        kept_nm=_kept(selected),
        experts_btm=_experts(selected, starts, [row.inputs for row in selected]),
    )


def _kept(rows: Sequence[TrainingSequence]) -> Tensor | None:
    """Return `Microbatch.kept_nm`."""
    if all(row.kept_ids is None for row in rows):
        return None
    counts_n = np.concatenate(
        [
            np.zeros(row.trained, np.int32) if row.kept_counts is None else row.kept_counts[row.mask]
            for row in rows
        ]
    )
    kept_nm = np.full((len(counts_n), counts_n.max()), -1, dtype=np.int64)
    ids = [row.kept_ids for row in rows if row.kept_ids is not None]
    # NumPy fills a mask row by row: one token's ids follow the other's, as in `kept_ids`.
    kept_nm[np.arange(kept_nm.shape[1]) < counts_n[:, None]] = np.concatenate(ids)
    return torch.from_numpy(kept_nm)

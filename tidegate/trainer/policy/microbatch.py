"""Layout: how rows go through the model so that little is computed twice and little is padding.

Axes in names: b rows of a microbatch, p prefixes, t positions, n trained tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from tidegate.trainer.batch.rows import TrainSequence
from tidegate.types import Ids

MICROBATCH_OVERHEAD = 64
"""What starting one more forward and backward pass costs, in padded tokens: the price at which rows of
different length share a microbatch. Measured for a model of 1M parameters on a CPU."""
MOST_PADDING = 0.05
"""The share of computed positions that may be padding, whatever starting one more pass costs."""
WORTH_SHARING = 0.15
"""Rows share a prefix where that saves at least this part of their inputs; attention with a prefix needs a
mask, which costs more than plain causal attention."""
SHORTEST_SAVING = 16
"""And at least so many tokens."""
PREFIX_SHARE = 8
"""A prefix's keys and values take about an eighth of the memory that a computed token's activations do."""


class ForwardPass(Protocol):
    """What goes through the model at once."""

    @property
    def positions(self) -> int:
        """Inputs with padding."""

    @property
    def tokens(self) -> int:
        """Inputs without padding."""


@dataclass(slots=True)
class Microbatch:
    """Rows that go through the model together, right-padded, and their trained tokens side by side.

    A row's inputs begin where its prefix ends (at 0 without one) and end before its last trained token:
    nothing is computed twice, and nothing that no gradient needs.
    """

    rows: list[int]
    """Which rows of the batch, in the order of b."""
    ids_bt: Tensor
    """int64, padded on the right with 0. Causal attention never looks there."""
    positions_bt: Tensor
    """int64, of the inputs in their rows."""
    lengths_b: Tensor
    """int64, the inputs of each row without padding."""
    prefix_b: Tensor
    """int64, which of the bundle's prefixes the row goes on from; 0 where there are none."""
    starts_b: Tensor
    """int64, the length of that prefix."""
    prefix_width: int
    """The longest of those; 0: nothing is shared."""
    at_n: Tensor
    """int64, where in the flattened ids_bt the token is predicted: one before its own position."""
    row_n: Tensor
    """int64, the row in b that the token belongs to."""
    targets_n: Tensor
    logprobs_n: Tensor
    versions_n: Tensor
    advantages_n: Tensor
    temperatures_n: Tensor
    weights_n: Tensor
    old_n: Tensor | None = None
    """log π_old, at the cut; None where there is one optimiser step a batch, for then π_θ is that policy."""
    reference_n: Tensor | None = None
    """log π_ref; None without a reference model."""

    def at_cut(self, logprobs_n: Tensor) -> Tensor:
        """log π_old, given log π_θ; constant, [n]."""
        return logprobs_n.detach() if self.old_n is None else self.old_n

    @property
    def positions(self) -> int:
        """Inputs with padding."""
        return self.ids_bt.numel()

    @property
    def tokens(self) -> int:
        """Inputs without padding."""
        return int(self.lengths_b.sum())

    def to(self, device: torch.device) -> Self:
        """The same on another device; itself where it is there already."""
        if self.ids_bt.device == device:
            return self
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        tensors: dict[str, Any] = {
            name: one.to(device) for name, one in values.items() if isinstance(one, Tensor)
        }
        return replace(self, **tensors)


@dataclass(slots=True)
class SharedPrefixes:
    """Beginnings that several rows share, right-padded; each goes through the model once."""

    ids_pt: Tensor
    lengths_p: Tensor

    @property
    def positions(self) -> int:
        """Inputs with padding."""
        return self.ids_pt.numel()

    @property
    def tokens(self) -> int:
        """Inputs without padding."""
        return int(self.lengths_p.sum())


@dataclass(slots=True)
class PrefixBatch:
    """Prefixes and the microbatches that go on from them; or microbatches of whole rows, and no prefix."""

    prefixes: list[SharedPrefixes]
    microbatches: list[Microbatch]

    @property
    def passes(self) -> list[ForwardPass]:
        """All that goes through the model."""
        return [*self.prefixes, *self.microbatches]


@dataclass(slots=True)
class _Cluster:
    """Rows (by their place in the batch) that begin with the same `shared` tokens."""

    rows: list[int]
    shared: int


def bundles(rows: Sequence[TrainSequence], max_tokens: int, *, share: bool = True) -> list[PrefixBatch]:
    """Lay rows out so that little is computed twice and little is padding.

    With `share`, what rows begin with alike, above all the prompt of a group's episodes, is computed
    once. `max_tokens` bounds the padded tokens of a microbatch and the prefixes of a bundle; what is
    longer by itself goes alone. Rows without a trained token are left out. The same rows give the same
    layout.
    """
    usable = [index for index, row in enumerate(rows) if row.mask.any()]
    clusters = _clusters(rows, usable) if share else []
    sharing = {index for cluster in clusters for index in cluster.rows}
    alone = [index for index in usable if index not in sharing]
    found = [PrefixBatch([], microbatches(rows, alone, max_tokens))] if alone else []
    filling: list[_Cluster] = []
    for cluster in sorted(clusters, key=lambda one: (-one.shared, one.rows)):
        if filling and sum(one.shared for one in filling) + cluster.shared > max_tokens:
            found.append(_bundle(rows, filling, max_tokens))
            filling = []
        filling.append(cluster)
    return [*found, _bundle(rows, filling, max_tokens)] if filling else found


def microbatches(
    rows: Sequence[TrainSequence],
    chosen: Sequence[int],
    max_tokens: int,
    *,
    prefixes: Mapping[int, tuple[int, int]] | None = None,
    overhead: int = MICROBATCH_OVERHEAD,
    most_padding: float = MOST_PADDING,
) -> list[Microbatch]:
    """Lay the chosen rows out in microbatches of at most `max_tokens` padded tokens, longest first.

    `prefixes` gives a row's prefix, as (number, length). Rows are sorted by the length of their inputs
    and cut where padding + `overhead` a microbatch is least, which is found exactly (dynamic programming
    over the sorted lengths); and finer where more than `most_padding` of the positions would be padding.
    """
    known = prefixes or {}
    lengths = {index: rows[index].inputs - known.get(index, (0, 0))[1] for index in chosen}
    order = sorted(chosen, key=lambda index: (-lengths[index], index))
    # A prefix is not computed again, but its keys and values are laid out for every row.
    margin = max((length for _, length in known.values()), default=0) // PREFIX_SHARE
    cuts = fine_cuts([lengths[index] for index in order], max_tokens, overhead, margin, most_padding)
    return [microbatch(rows, order[start:end], known) for start, end in cuts]


def padding_ratio(passes: Iterable[ForwardPass]) -> float:
    """The share of the computed positions that is padding, 0 ≤ ratio < 1; 0 for no passes."""
    laid = [(one.positions, one.tokens) for one in passes]
    computed = sum(positions for positions, _ in laid)
    return 1.0 - sum(tokens for _, tokens in laid) / computed if computed else 0.0


def _clusters(rows: Sequence[TrainSequence], usable: Sequence[int]) -> list[_Cluster]:
    """Rows with enough in common, found among neighbours in lexicographic order.

    A row joins its neighbours as long as that saves more than their being without it.
    """
    order = sorted(usable, key=lambda index: rows[index].ids.astype(">i4").tobytes())
    found: list[_Cluster] = []
    for index in order:
        last = found[-1] if found else None
        shared = min(last.shared, _common(rows[last.rows[-1]].ids, rows[index])) if last else 0
        if last and len(last.rows) * shared > (len(last.rows) - 1) * last.shared:
            last.rows.append(index)
            last.shared = shared
        else:
            found.append(_Cluster([index], _reach(rows[index])))
    return [one for one in found if _is_worth_it(rows, one)]


def _is_worth_it(rows: Sequence[TrainSequence], cluster: _Cluster) -> bool:
    saved = (len(cluster.rows) - 1) * cluster.shared
    return saved > SHORTEST_SAVING and saved >= WORTH_SHARING * sum(
        rows[index].inputs for index in cluster.rows
    )


def _reach(row: TrainSequence) -> int:
    """How much of a row may be prefix: its first trained token must be predicted behind it."""
    return max(0, int(np.flatnonzero(row.mask)[0]) - 1)


def _common(ids: Ids, row: TrainSequence) -> int:
    """How many tokens a row and another's ids begin with alike, within the row's reach."""
    length = min(len(ids), _reach(row))
    different = np.flatnonzero(ids[:length] != row.ids[:length])
    return int(different[0]) if len(different) else length


def _bundle(rows: Sequence[TrainSequence], clusters: Sequence[_Cluster], max_tokens: int) -> PrefixBatch:
    """Clusters in descending order of what they share, as prefixes and microbatches."""
    places = {
        index: (number, cluster.shared) for number, cluster in enumerate(clusters) for index in cluster.rows
    }
    prefixes = []
    for start, end in fine_cuts([one.shared for one in clusters], max_tokens):
        beginnings = [rows[one.rows[0]].ids[: one.shared] for one in clusters[start:end]]
        lengths = torch.tensor([len(one) for one in beginnings])
        prefixes.append(SharedPrefixes(_padded(beginnings), lengths))
    laid = microbatches(rows, sorted(places), max_tokens, prefixes=places)
    return PrefixBatch(prefixes, laid)


def fine_cuts(
    lengths: Sequence[int],
    max_tokens: int,
    overhead: int = MICROBATCH_OVERHEAD,
    margin: int = 0,
    most_padding: float = MOST_PADDING,
) -> list[tuple[int, int]]:
    """Descending lengths cut into runs, as (start, end): the cheapest cut, at the highest price of a run up
    to `overhead` at which little enough is padding."""
    while True:
        cuts = _cuts(lengths, max_tokens, overhead, margin)
        laid = sum((end - start) * lengths[start] for start, end in cuts)
        if not overhead or laid - sum(lengths) <= most_padding * laid:
            return cuts
        overhead //= 2


def _cuts(lengths: Sequence[int], max_tokens: int, overhead: int, margin: int = 0) -> list[tuple[int, int]]:
    """The cheapest cut of descending lengths into runs, as (start, end); a run costs rows · longest."""
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
    cuts = []
    end = count
    while end:
        cuts.append((int(back[end]), end))
        end = int(back[end])
    return cuts[::-1]


def _padded(sequences: Sequence[Ids]) -> Tensor:
    """int64 [sequences, longest], filled up on the right with 0."""
    padded = np.zeros((len(sequences), max(map(len, sequences))), dtype=np.int64)
    for at, ids in enumerate(sequences):
        padded[at, : len(ids)] = ids
    return torch.from_numpy(padded)


def microbatch(
    rows: Sequence[TrainSequence], chosen: list[int], prefixes: Mapping[int, tuple[int, int]]
) -> Microbatch:
    """The chosen rows as one microbatch; `prefixes` gives a row's prefix, as (number, length)."""
    taken = [rows[index] for index in chosen]
    numbers, starts = zip(*(prefixes.get(index, (0, 0)) for index in chosen), strict=True)
    inputs = [row.ids[start : row.inputs] for row, start in zip(taken, starts, strict=True)]
    ids_bt = _padded(inputs)
    width = ids_bt.shape[1]
    starts_b = torch.tensor(starts)
    trained = [np.flatnonzero(row.mask) for row in taken]
    counts = [len(positions) for positions in trained]

    def side_by_side(name: str) -> Tensor:
        arrays = [getattr(row, name)[positions] for row, positions in zip(taken, trained, strict=True)]
        return torch.from_numpy(np.concatenate(arrays))

    def if_known(name: str) -> Tensor | None:
        return None if getattr(taken[0], name) is None else side_by_side(name)

    at_n = [at * width + positions - 1 - starts[at] for at, positions in enumerate(trained)]
    return Microbatch(
        rows=chosen,
        ids_bt=ids_bt,
        positions_bt=starts_b[:, None] + torch.arange(width),
        lengths_b=torch.tensor([len(ids) for ids in inputs]),
        prefix_b=torch.tensor(numbers),
        starts_b=starts_b,
        prefix_width=max(starts),
        at_n=torch.from_numpy(np.concatenate(at_n)),
        row_n=torch.from_numpy(np.repeat(np.arange(len(taken)), counts)),
        targets_n=side_by_side("ids").long(),
        logprobs_n=side_by_side("logprobs"),
        versions_n=side_by_side("versions"),
        advantages_n=side_by_side("advantages"),
        temperatures_n=side_by_side("temperature"),
        weights_n=torch.from_numpy(np.repeat(np.array([row.weight for row in taken], np.float32), counts)),
        old_n=if_known("old"),
        reference_n=if_known("reference"),
    )

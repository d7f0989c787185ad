"""Microbatches: the tensors of the rows and shared prefixes that one forward pass computes.

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


def padding_ratio(passes: Iterable[ForwardPass]) -> float:
    """Return the share of padding in the computed positions, 0 ≤ ratio < 1; 0 without passes."""
    sizes = [(forward_pass.positions, forward_pass.tokens) for forward_pass in passes]
    computed = sum(positions for positions, _ in sizes)
    return 1.0 - sum(tokens for _, tokens in sizes) / computed if computed else 0.0


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


def shared_prefixes(rows: Sequence[TrainingSequence], lengths: Sequence[int]) -> SharedPrefixes:
    """Build the prefixes of these lengths that the rows begin with."""
    ids = [row.ids[:length] for row, length in zip(rows, lengths, strict=True)]
    return SharedPrefixes(_padded(ids), torch.tensor(lengths), _experts(rows, [0] * len(rows), lengths))


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

"""From trajectories to tensors: which tokens are trained, and how they are laid out to waste little.

Axes in names: b rows of a microbatch, t positions of a row, n trained tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tidegate.errors import TrainingError
from tidegate.types import Ids, Logprobs, Trajectory, Turn

MICROBATCH_OVERHEAD = 128
"""What starting one more forward and backward pass costs, in padded tokens: the price at which rows of
different length share a microbatch. Measured for a model of 1M parameters on a CPU."""


@dataclass(slots=True)
class Row:
    """One exported sequence of a trajectory; every array is [t], aligned with `ids`.

    Where `mask` is False the token is context, and the other arrays hold neutral values.
    """

    ids: Ids
    mask: npt.NDArray[np.bool_]
    """True: this token was sampled, delivered, and is trained in this row."""
    logprobs: Logprobs
    """log μ, as the engine recorded it."""
    versions: npt.NDArray[np.int64]
    """The policy version that sampled the token; −1 where it is unknown or context."""
    temperature: npt.NDArray[np.float32]
    advantage: float
    weight: float = 1.0
    """Of each trained token in the loss: 1 under token mean, 1 ÷ the trajectory's trained tokens under
    sequence mean."""
    group_id: str = ""
    session_id: str = ""

    @property
    def trained(self) -> int:
        """How many of its tokens are trained."""
        return int(np.count_nonzero(self.mask))

    @property
    def inputs(self) -> int:
        """How many leading tokens the model must read: all before the last trained one."""
        return int(np.flatnonzero(self.mask)[-1])


def rows_of(trajectory: Trajectory, advantage: float) -> list[Row]:
    """The sequences that a trajectory's tree of turns is trained as, none if nothing can be trained.

    Each path from a root to a last turn that can be trained is one sequence. Every delivered token that
    was sampled freely is trained in exactly one of them: what several paths share is trained in the
    first and context in the others. Undelivered turns are never trained, but may be context.

    Raises TrainingError where a turn's arrays differ in length, or a reply follows nothing.
    """
    rows = []
    done: set[int] = set()
    for leaf in _leaves(trajectory):
        path = _path(trajectory, leaf)
        chosen = {turn.index for turn in path if _trainable(turn)} - done
        done |= chosen
        rows.append(_row(trajectory, path, chosen, advantage))
    return rows


def _trainable(turn: Turn) -> bool:
    return turn.delivered and bool(
        len(turn.output_ids) if turn.output_mask is None else turn.output_mask.any()
    )


def _leaves(trajectory: Trajectory) -> list[Turn]:
    """The turns that can be trained and have no descendant that can, in order."""
    turns = [turn for turn in trajectory.turns if _trainable(turn)]
    inner: set[int] = set()
    for turn in turns:
        parent = turn.parent
        while parent is not None and parent not in inner:
            inner.add(parent)
            parent = trajectory.turns[parent].parent
    return [turn for turn in turns if turn.index not in inner]


def _path(trajectory: Trajectory, leaf: Turn) -> list[Turn]:
    path = [leaf]
    while path[-1].parent is not None:
        path.append(trajectory.turns[path[-1].parent])
    return path[::-1]


def _row(trajectory: Trajectory, path: Sequence[Turn], chosen: set[int], advantage: float) -> Row:
    length = sum(len(turn.delta_ids) + len(turn.output_ids) for turn in path)
    row = Row(
        ids=np.empty(length, dtype=np.int32),
        mask=np.zeros(length, dtype=np.bool_),
        logprobs=np.zeros(length, dtype=np.float32),
        versions=np.full(length, -1, dtype=np.int64),
        temperature=np.ones(length, dtype=np.float32),
        advantage=float(advantage),
        group_id=trajectory.group_id or "",
        session_id=trajectory.session_id,
    )
    start = 0
    for turn in path:
        middle = start + len(turn.delta_ids)
        end = middle + len(turn.output_ids)
        row.ids[start:middle] = turn.delta_ids
        row.ids[middle:end] = turn.output_ids
        if turn.index in chosen:
            _mark(row, turn, middle, end, trajectory.session_id)
        start = end
    return row


def _mark(row: Row, turn: Turn, start: int, end: int, session_id: str) -> None:
    """Enter a turn's sampled tokens, at `start..end` of the row, as trained."""
    where = f"session {session_id}, turn {turn.index}"
    mask = np.ones(end - start, dtype=np.bool_) if turn.output_mask is None else turn.output_mask != 0
    if len(turn.logprobs) != end - start or len(mask) != end - start:
        raise TrainingError(
            f"{where}: {end - start} output tokens, but {len(turn.logprobs)} logprobs and a mask of "
            f"{len(mask)}; the engine's answer was recorded wrongly"
        )
    if not start and mask.any():
        raise TrainingError(f"{where}: its prompt is empty, so its first token has no distribution")
    row.mask[start:end] = mask
    row.logprobs[start:end] = np.where(mask, turn.logprobs, 0.0)
    row.versions[start:end] = np.where(mask, turn.token_versions(), -1)
    row.temperature[start:end] = np.where(mask, turn.temperature, 1.0)


@dataclass(slots=True)
class Microbatch:
    """Rows that go through the model together, right-padded, and their trained tokens side by side.

    The inputs end before each row's last trained token: nothing is computed that no gradient needs.
    """

    rows: list[int]
    """Which rows of the batch, in the order of b."""
    ids_bt: Tensor
    """int64, padded on the right with 0. Causal attention never looks there."""
    positions_bt: Tensor
    """int64, 0, 1, 2, … in every row."""
    lengths_b: Tensor
    """int64, the inputs of each row without padding."""
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

    @property
    def tokens(self) -> int:
        """Input tokens without padding."""
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


def microbatches(
    rows: Sequence[Row], max_tokens: int, *, overhead: int = MICROBATCH_OVERHEAD
) -> list[Microbatch]:
    """Lay rows out in microbatches of at most `max_tokens` padded tokens, longest rows first.

    Rows are sorted by length and cut where padding + `overhead` a microbatch is least, which is found
    exactly (dynamic programming over the sorted lengths). A row longer than `max_tokens` goes alone.
    Rows without a trained token are left out. The same rows give the same layout.
    """
    lengths = {index: row.inputs for index, row in enumerate(rows) if row.mask.any()}
    order = sorted(lengths, key=lambda index: (-lengths[index], index))
    cuts = _cuts([lengths[index] for index in order], max_tokens, overhead)
    return [_microbatch(rows, order[start:end]) for start, end in cuts]


def padding_ratio(batches: Iterable[Microbatch]) -> float:
    """The share of the computed positions that is padding, 0 ≤ ratio < 1; 0 for no batches."""
    laid = [(batch.ids_bt.numel(), batch.tokens) for batch in batches]
    computed = sum(padded for padded, _ in laid)
    return 1.0 - sum(tokens for _, tokens in laid) / computed if computed else 0.0


def _cuts(lengths: Sequence[int], max_tokens: int, overhead: int) -> list[tuple[int, int]]:
    """The cheapest cut of descending lengths into runs, as (start, end); a run costs rows · longest."""
    count = len(lengths)
    cost = np.full(count + 1, np.iinfo(np.int64).max, dtype=np.int64)
    cost[0] = 0
    back = np.zeros(count + 1, dtype=np.int64)
    for start, longest in enumerate(lengths):
        size = min(count - start, max(1, max_tokens // max(1, longest)))
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


def _microbatch(rows: Sequence[Row], chosen: list[int]) -> Microbatch:
    taken = [rows[index] for index in chosen]
    lengths = [row.inputs for row in taken]
    width = max(lengths)
    ids_bt = np.zeros((len(taken), width), dtype=np.int64)
    for at, row in enumerate(taken):
        ids_bt[at, : lengths[at]] = row.ids[: lengths[at]]
    trained = [np.flatnonzero(row.mask) for row in taken]
    counts = [len(positions) for positions in trained]

    def side_by_side(name: str) -> Tensor:
        arrays = [getattr(row, name)[positions] for row, positions in zip(taken, trained, strict=True)]
        return torch.from_numpy(np.concatenate(arrays))

    def spread(values: list[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.asarray(values, dtype=np.float32), counts))

    at_n = np.concatenate([at * width + positions - 1 for at, positions in enumerate(trained)])
    return Microbatch(
        rows=chosen,
        ids_bt=torch.from_numpy(ids_bt),
        positions_bt=torch.arange(width).expand(len(taken), width),
        lengths_b=torch.tensor(lengths),
        at_n=torch.from_numpy(at_n),
        row_n=torch.from_numpy(np.repeat(np.arange(len(taken)), counts)),
        targets_n=side_by_side("ids").long(),
        logprobs_n=side_by_side("logprobs"),
        versions_n=side_by_side("versions"),
        advantages_n=spread([row.advantage for row in taken]),
        temperatures_n=side_by_side("temperature"),
        weights_n=spread([row.weight for row in taken]),
    )

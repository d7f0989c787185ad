"""Converts trajectories to token sequences, and marks the tokens to train on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tidegate.errors import TrainingError
from tidegate.sequences import training_sequences
from tidegate.turn import Ids, Logprobs, Turn
from tidegate.types import Trajectory


@dataclass(slots=True)
class TrainingSequence:
    """One token sequence of a trajectory; every array is [t], aligned with `ids`.

    Where `mask` is False the token is context, and the other arrays hold neutral values.
    """

    ids: Ids
    mask: npt.NDArray[np.bool_]
    """True: the token was sampled and delivered, and is trained in this row."""
    logprobs: Logprobs
    """log μ, as recorded by the engine."""
    versions: npt.NDArray[np.int64]
    """Policy version that sampled the token, or an older one of its turn's keys and values; −1 if unknown or
    context."""
    temperature: npt.NDArray[np.float32]
    advantages: npt.NDArray[np.float32]
    _: KW_ONLY
    weight: float = 1.0
    """Weight of each trained token in the loss: 1 for a token mean, 1 ÷ the trajectory's trained tokens for a
    mean over trajectories."""
    group_id: str = ""
    session_id: str = ""
    policy: str = ""
    """Name of the policy that sampled its trained tokens; "" in a run with one policy."""
    old: Logprobs | None = None
    """log π_old, of the policy when the batch is assembled, if a batch has several optimiser steps."""
    reference: Logprobs | None = None
    """log π_ref, if there is a reference model."""
    teacher: Logprobs | None = None
    """log p_teacher, if there is a teacher."""
    teacher_ids: npt.NDArray[np.int32] | None = None
    """The teacher's k likeliest ids at each token, [t, k], if they were requested."""
    teacher_top: Logprobs | None = None
    """log p_teacher of these ids, [t, k]."""
    sampler_ids: npt.NDArray[np.int32] | None = None
    """The k likeliest ids of the engine in place of each token, [t, k], if they were recorded."""
    sampler_listed: npt.NDArray[np.float16] | None = None
    """log μ of these ids, [t, k]."""
    kept_ids: Ids | None = None
    """The ids that top-p, top-k and min-p kept, of one trained token after the other; None: they kept all."""
    kept_counts: Ids | None = None
    """Numbers of these ids; 0: the token was drawn from the whole vocabulary."""
    experts: npt.NDArray[np.uint16] | None = None
    """The experts with which the engine computed each token but the last, [t, layers · k], if they were
    recorded for all."""

    @property
    def trained(self) -> int:
        """Number of trained tokens."""
        return int(np.count_nonzero(self.mask))

    @property
    def inputs(self) -> int:
        """Number of tokens that the model reads: all before the last trained one."""
        return int(np.flatnonzero(self.mask)[-1])


def rows_of(trajectory: Trajectory, advantage: float | Sequence[float]) -> list[TrainingSequence]:
    """Convert a trajectory's tree of turns to sequences; none if no turn can be trained on.

    Every delivered, freely sampled token is trained in exactly one of them, by `training_sequences`.
    Undelivered and exempt turns are never trained, but may be context.

    Args:
        trajectory: The episode.
        advantage: Advantage of every token, or one per turn.

    Raises:
        TrainingError: A turn's arrays differ in length, or a reply has an empty prompt.
    """
    turns = trajectory.turns
    by_turn = [advantage] * len(turns) if isinstance(advantage, float | int) else advantage
    advantages = {turn.index: value for turn, value in zip(turns, by_turn, strict=True)}
    return [_row(trajectory, path, own, advantages) for path, own in trained_paths(trajectory)]


def trained_paths(trajectory: Trajectory) -> Iterator[tuple[list[Turn], set[int]]]:
    """Yield the turns of each sequence that is trained on, and the indices of those to train in it."""
    turns = {turn.index: turn for turn in trajectory.turns}
    parents = {index: turn.parent for index, turn in turns.items()}
    trained = {index for index, turn in turns.items() if is_trained(turn)}
    for path, own in training_sequences(parents, trained):
        yield [turns[index] for index in path], own


def minibatches(rows: Sequence[TrainingSequence], number: int) -> list[list[TrainingSequence]]:
    """Split the rows, in order, into `number` parts of equally many groups, give or take one.

    There are fewer parts if there are fewer groups. A group is never split, so its prompt is computed once.
    """
    by_group: dict[str, list[TrainingSequence]] = {}
    for row in rows:
        by_group.setdefault(row.group_id, []).append(row)
    groups, number = list(by_group.values()), min(number, len(by_group))
    bounds = [len(groups) * part // number for part in range(number + 1)]
    return [
        [row for group in groups[start:end] for row in group] for start, end in itertools.pairwise(bounds)
    ]


def check_scored(rows: Sequence[TrainingSequence], top_k: int) -> None:
    """Raises TrainingError if a row has no logprobs of the teacher, so that none is trained on without.

    Args:
        rows: rows of a batch.
        top_k: number of the teacher's likeliest tokens that are needed, too.
    """
    for row in rows:
        if row.teacher is None:
            raise TrainingError(
                f"session {row.session_id} has no logprobs of the teacher (trainer.teacher), so its batch "
                "cannot be trained on; a replay with a teacher needs a run that had one"
            )
        found = 0 if row.teacher_ids is None else row.teacher_ids.shape[1]
        if top_k and found != top_k:
            raise TrainingError(
                f"session {row.session_id} has {found} likeliest tokens of the teacher at each token, not "
                f"{top_k} (trainer.teacher.top_k), so its batch cannot be trained on; a replay with "
                'teacher.form = "distribution" needs a run that had it, with the same top_k'
            )


def check_listed(rows: Sequence[TrainingSequence]) -> None:
    """Raises TrainingError if a row has no likeliest ids of the engine, which score centering needs."""
    for row in rows:
        if row.sampler_ids is None:
            raise TrainingError(
                f"session {row.session_id} has no likeliest ids of the engine, so its batch cannot be "
                "trained on with trainer.loss.score_centering: it was recorded without. Set score_centering "
                "= 0 until such groups are trained on; a replay with it needs a run that had it"
            )


def check_routed(rows: Sequence[TrainingSequence], width: int, experts: int) -> None:
    """Raises TrainingError if a row has no experts of its tokens, or those of another model.

    Args:
        rows: rows of a batch.
        width: number of layers, times that of the experts of a token.
        experts: number of experts in a layer.
    """
    for row in rows:
        if row.experts is None:
            why = "no experts of its tokens: it was recorded without"
        elif row.experts.shape[1] != width or row.experts.max(initial=0) >= experts:
            why = (
                f"{row.experts.shape[1]} experts for a token with ids up to {row.experts.max(initial=0)}, "
                f"where the trained model has {width} with ids below {experts}"
            )
        else:
            continue
        raise TrainingError(
            f"session {row.session_id} has {why}; its batch cannot be trained on with "
            "trainer.routing_replay. Switch it off until such groups are trained on; a replay with it needs "
            "a run that had it"
        )


def is_trained(turn: Turn) -> bool:
    """Whether a turn has tokens to train on."""
    return turn.trainable and bool(
        len(turn.output_ids) if turn.output_mask is None else turn.output_mask.any()
    )


def _row(
    trajectory: Trajectory, path: Sequence[Turn], chosen: set[int], advantages: Mapping[int, float]
) -> TrainingSequence:
    spans: list[tuple[Turn, slice, npt.NDArray[np.bool_]]] = []
    """The turns that are trained in this row, the places of their sampled tokens, and the mask of these."""
    length = 0
    for turn in path:
        start = length + len(turn.delta_ids)
        length = start + len(turn.output_ids)
        if turn.index in chosen:
            mask = _mask(turn, start, f"session {trajectory.session_id}, turn {turn.index}")
            spans.append((turn, slice(start, length), mask))

    def spread(values: Callable[[Turn], Any], dtype: Any, neutral: float = 0) -> Any:
        """Return an array with the values of the trained tokens, and a neutral one elsewhere."""
        row = np.full(length, neutral, dtype)
        for turn, place, mask in spans:
            given = values(turn)
            row[place][mask] = given[mask] if isinstance(given, np.ndarray) else given
        return row

    def lists(values: Callable[[Turn], Any], dtype: Any, width: int) -> Any:
        """Return so many recorded values of each sampled token, and 0 elsewhere; None without."""
        row: Any = np.zeros((length, width), dtype) if width else None
        for turn, place, mask in spans if width else ():
            row[place] = values(turn).reshape(len(mask), -1)[:, :width]
        return row

    # Turns before and after a change of `score_centering` differ in number: all have the smallest.
    listed = min((turn.top_k for turn, _, _ in spans), default=0)
    scored = bool(spans) and all(turn.teacher_logprobs is not None for turn, _, _ in spans)
    widths = {turn.teacher_top_k for turn, _, _ in spans} if scored else set()
    top = widths.pop() if len(widths) == 1 else 0
    kept = [
        turn.kept_ids[np.repeat(mask, turn.kept_counts)]
        for turn, _, mask in spans
        if turn.kept_ids is not None and turn.kept_counts is not None
    ]
    return TrainingSequence(
        ids=np.concatenate(
            [ids for turn in path for ids in (turn.delta_ids, turn.output_ids)], dtype=np.int32
        ),
        mask=spread(lambda turn: True, np.bool_),
        logprobs=spread(lambda turn: turn.logprobs, np.float32),
        versions=spread(_versions, np.int64, neutral=-1),
        temperature=spread(lambda turn: turn.temperature, np.float32, neutral=1),
        advantages=spread(lambda turn: advantages[turn.index], np.float32),
        group_id=trajectory.group_id or "",
        session_id=trajectory.session_id,
        policy=path[-1].policy,
        teacher=spread(lambda turn: turn.teacher_logprobs, np.float32) if scored else None,
        teacher_ids=lists(lambda turn: turn.teacher_top_ids, np.int32, top),
        teacher_top=lists(lambda turn: turn.teacher_top_logprobs, np.float32, top),
        sampler_ids=lists(lambda turn: turn.top_ids, np.int32, listed),
        sampler_listed=lists(lambda turn: turn.top_logprobs, np.float16, listed),
        kept_ids=np.concatenate(kept) if kept else None,
        kept_counts=spread(lambda turn: 0 if turn.kept_counts is None else turn.kept_counts, np.int32)
        if kept
        else None,
        experts=_experts(trajectory.session_id, path, length),
    )


def _mask(turn: Turn, start: int, where: str) -> npt.NDArray[np.bool_]:
    """Return which sampled tokens of a turn, from `start` on in a row, are trained. Raises TrainingError."""
    number = len(turn.output_ids)
    mask = np.ones(number, dtype=np.bool_) if turn.output_mask is None else turn.output_mask != 0
    if len(turn.logprobs) != number or len(mask) != number:
        raise TrainingError(
            f"{where}: {number} output tokens, but {len(turn.logprobs)} logprobs and a mask of "
            f"{len(mask)}; the engine's reply was recorded wrongly"
        )
    if not start and mask.any():
        raise TrainingError(f"{where}: its prompt is empty, so its first token has no distribution")
    return mask


def _versions(turn: Turn) -> npt.NDArray[np.int64]:
    versions = turn.token_versions()
    return versions if turn.kv_version is None else np.minimum(versions, turn.kv_version)


def _experts(session: str, path: Sequence[Turn], length: int) -> npt.NDArray[np.uint16] | None:
    """Join the experts that the turns of a path with so many tokens recorded."""
    parts, widths = [], set()
    for turn in path:
        if turn.experts is None:
            return None
        if tokens := turn.routed_tokens:
            width, rest = divmod(len(turn.experts), tokens)
            widths.add(width if not rest else -1)
            parts.append(turn.experts)
    if len(widths) != 1 or min(widths) < 1:
        raise TrainingError(
            f"session {session}: {[len(part) for part in parts]} experts of "
            f"{[turn.routed_tokens for turn in path]} tokens; the engine's reply was recorded wrongly"
        )
    experts = np.zeros((length, widths.pop()), dtype=np.uint16)
    # The last token was sampled but never read, so the engine chose no experts for it.
    experts[:-1] = np.concatenate(parts).reshape(length - 1, -1)
    return experts

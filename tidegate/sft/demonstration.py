"""A demonstration: token sequences with the mask of the tokens that the model learns to produce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tidegate.trainer.batch.rows import TrainingSequence
from tidegate.turn import Ids


@dataclass(frozen=True, slots=True)
class Demonstration:
    """The sequences of one episode or chat."""

    task: str
    """Demonstrations of one task are either all trained on, or all used for validation."""
    place: str
    """Where it is from, for messages."""
    rows: list[TrainingSequence]
    """Each has a trained token."""


def demonstration(
    task: str, place: str, sequences: Sequence[tuple[Ids, npt.NDArray[np.bool_]]]
) -> Demonstration:
    """Make a demonstration of (ids, mask) pairs; sequences without a trained token are left out."""
    rows = [_row(ids, mask, place) for ids, mask in sequences if mask.any()]
    return Demonstration(task, place, rows)


def _row(ids: Ids, mask: npt.NDArray[np.bool_], place: str) -> TrainingSequence:
    """Return a row whose trained tokens have the advantage 1 and the temperature 1."""
    length = len(ids)
    return TrainingSequence(
        ids=np.asarray(ids, dtype=np.int32),
        mask=mask,
        logprobs=np.zeros(length, dtype=np.float32),
        versions=np.full(length, -1, dtype=np.int64),
        temperature=np.ones(length, dtype=np.float32),
        advantages=mask.astype(np.float32),
        group_id=place,
        session_id=place,
    )

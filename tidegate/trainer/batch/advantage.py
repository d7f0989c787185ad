"""Advantages: how much better an episode did than the other attempts at the same task.

Returns and advantages of a group are float64 [episodes, turns]; a column each where turns have rewards of
their own, else all columns are alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

EPSILON = 1e-6
"""Added to the standard deviation, so that nearly equal rewards are not blown up into full credit."""

Floats = npt.NDArray[np.float64]


def centred(returns: Floats) -> Floats:
    """Returns less the group's mean at each turn: Dr. GRPO's advantage (Liu et al., Understanding
    R1-Zero-Like Training, 2025), which does not favour tasks that are nearly always or nearly never
    solved. Turns at which all returns are equal up to rounding get exact zeros.

    Raises ValueError for an empty group and for a return that is not a finite number.
    """
    if not returns.size or not np.isfinite(returns).all():
        raise ValueError(f"a group's returns must be finite numbers, at least one, not {returns.tolist()}")
    alike = np.ptp(returns, axis=0) <= 1e-9 * np.maximum(1.0, np.abs(returns).max(axis=0))
    return np.where(alike, 0.0, returns - returns.mean(axis=0))


def group_deviation(apart: Floats) -> float:
    """The standard deviation of a group, whose centred returns are given: GRPO's (Shao et al., DeepSeekMath,
    2024, §4.1.2; the sample's, as in verl and TRL). Over several turns: the root of the mean variance."""
    return float(np.sqrt(np.square(apart).mean() * len(apart) / max(1, len(apart) - 1)))


def batch_deviation(groups: Sequence[Floats]) -> float:
    """The standard deviation over all episodes of a batch, of whose groups the centred returns are given
    (Hu et al., REINFORCE++, 2025, with the group's mean as the baseline)."""
    return float(np.sqrt(np.concatenate([np.square(one).mean(axis=1) for one in groups]).mean()))


def scaled(apart: Floats, deviation: float) -> Floats:
    """Centred returns ÷ (deviation + ε)."""
    return apart / (deviation + EPSILON)


def is_zero_variance(rewards: Sequence[float]) -> bool:
    """Whether the rewards are equal up to rounding, so that comparing them teaches nothing.

    Raises ValueError as `centred` does.
    """
    return not centred(np.asarray(rewards, dtype=np.float64)[:, None]).any()

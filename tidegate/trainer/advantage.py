"""Advantages: how much better an episode did than the other attempts at the same task."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

EPSILON = 1e-6
"""Added to the standard deviation, so that nearly equal rewards are not blown up into full credit."""


def group_advantages(rewards: Sequence[float], *, normalize: bool) -> npt.NDArray[np.float32]:
    """Rewards minus their group's mean; float32 [group].

    `normalize` divides by the group's standard deviation: (r − mean) ÷ (std + ε), GRPO (Shao et al.,
    DeepSeekMath, 2024, §4.1.2; the sample's standard deviation and ε as in verl and TRL). Without it this
    is Dr. GRPO's advantage (Liu et al., Understanding R1-Zero-Like Training, 2025), which does not favour
    tasks that are nearly always or nearly never solved. A group of equal rewards gets exact zeros.

    Raises ValueError for an empty group and for a reward that is not a finite number.
    """
    values = _checked(rewards)
    if is_zero_variance(rewards):
        return np.zeros(len(values), dtype=np.float32)
    centred: npt.NDArray[np.float64] = values - values.mean()
    if normalize:
        centred /= values.std(ddof=1) + EPSILON
    return centred.astype(np.float32)


def is_zero_variance(rewards: Sequence[float]) -> bool:
    """Whether the rewards are equal up to rounding, so that comparing them teaches nothing.

    Such a group is left out of the batch (DAPO's dynamic sampling, Yu et al., 2025, §3.2).
    """
    values = _checked(rewards)
    scale = max(1.0, float(np.abs(values).max()))
    return bool(np.ptp(values) <= 1e-9 * scale)


def _checked(rewards: Sequence[float]) -> npt.NDArray[np.float64]:
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError(f"a group's rewards are a sequence of at least one number, not {rewards!r}")
    if not np.isfinite(values).all():
        raise ValueError(f"a group's rewards must be finite numbers, not {rewards!r}")
    return values

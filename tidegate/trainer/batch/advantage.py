"""Advantages: the return of an episode relative to the other attempts at the same task.

Returns and advantages of a group are float64 [episodes, turns]. Without rewards of single turns all columns
are equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

EPSILON = 1e-6
"""Added to the standard deviation, so that nearly equal rewards do not get large advantages."""

Floats = npt.NDArray[np.float64]


def centred(returns: Floats) -> Floats:
    """Return the returns minus the group's mean at each turn.

    This is Dr. GRPO's advantage (Liu et al., Understanding R1-Zero-Like Training, 2025), which does not
    favour tasks that are nearly always or nearly never solved. Turns at which all returns are equal up to
    rounding get exact zeros. Raises ValueError for an empty group and for returns that are not finite.
    """
    if not returns.size or not np.isfinite(returns).all():
        raise ValueError(f"a group's returns must be one or more finite numbers, not {returns.tolist()}")
    # By tolerance: divided by the deviation, mere rounding would become advantages of full size.
    alike = np.ptp(returns, axis=0) <= 1e-9 * np.maximum(1.0, np.abs(returns).max(axis=0))
    return np.where(alike, 0.0, returns - returns.mean(axis=0))


def leave_one_out(centred: Floats) -> Floats:
    """Return the returns minus the mean of the group's other episodes, given the centred ones.

    This is RLOO's advantage (Ahmadian et al., Back to Basics, 2024, eq. 7): R_i − mean_{j≠i} R_j
    = n/(n − 1) · (R_i − mean R). Raises ValueError for a single episode.
    """
    if len(centred) < 2:
        raise ValueError("an episode alone in its group cannot be compared with the others")
    return centred * (len(centred) / (len(centred) - 1))


def group_deviation(centred: Floats) -> float:
    """Return the standard deviation of a group's returns, given the centred ones.

    This is GRPO's (Shao et al., DeepSeekMath, 2024, §4.1.2), with the sample's deviation as in verl and TRL.
    Over several turns it is the root of the mean variance.
    """
    return float(np.sqrt(np.square(centred).mean() * len(centred) / max(1, len(centred) - 1)))


def batch_deviation(groups: Sequence[Floats]) -> float:
    """Return the root mean square of a batch's centred returns, over all its episodes.

    With the batch's mean as the baseline this is the batch's standard deviation, with the group's mean the
    pooled deviation within groups (Hu et al., REINFORCE++, 2025).
    """
    return float(np.sqrt(np.concatenate([np.square(group).mean(axis=1) for group in groups]).mean()))


def scaled(centred: Floats, deviation: float) -> Floats:
    """Return centred returns ÷ (deviation + ε)."""
    return centred / (deviation + EPSILON)


def is_zero_variance(rewards: Sequence[float]) -> bool:
    """Whether the rewards are equal up to rounding. Raises ValueError as `centred` does."""
    return not centred(np.asarray(rewards, dtype=np.float64)[:, None]).any()

"""Estimates pass@k, and means with confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

LEVEL = 0.95
_Z = 1.959963984540054
"""The normal distribution's quantile at (1 + LEVEL) / 2."""
RESAMPLES = 2000
_CHUNK = 100


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over `tasks` tasks with its confidence interval at `level`, and the interval's method."""

    mean: float
    low: float
    high: float
    tasks: int
    method: str
    level: float = LEVEL

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Returns the unbiased estimate that at least one of k samples is right, from `right` of `samples`.

    1 − C(n − c, k) ÷ C(n, k), as a product (Chen et al. 2021, arXiv:2107.03374, equation 1). Raises
    ValueError unless 1 ≤ k ≤ samples and 0 ≤ right ≤ samples.
    """
    if not 1 <= k <= samples or not 0 <= right <= samples:
        raise ValueError(f"pass@{k} cannot be estimated from {right} right of {samples} samples")
    if samples - right < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / n for n in range(samples - right + 1, samples + 1))


def estimate(values: Sequence[float]) -> Estimate:
    """Returns the mean of one value per task, with its confidence interval.

    If every value is 0 or 1, Wilson's score interval (Wilson 1927, JASA 22:209), which is accurate for
    few tasks and for means near 0 and 1; else the percentiles of RESAMPLES bootstrap resamples of the
    tasks (Efron 1979), because samples of one task are not independent. Raises ValueError without values.
    """
    if not len(values):
        raise ValueError("cannot estimate a mean without values")
    array = np.asarray(values, dtype=np.float64)
    if bool(np.isin(array, (0.0, 1.0)).all()):
        low, high = wilson(int(array.sum()), len(array))
        method = "Wilson score interval"
    else:
        low, high = bootstrap(array)
        method = f"bootstrap over tasks, {RESAMPLES} resamples"
    return Estimate(float(array.mean()), low, high, len(array), method)


def wilson(right: int, total: int) -> tuple[float, float]:
    """Returns the score interval of a share at LEVEL."""
    share, z2 = right / total, _Z**2
    centre = share + z2 / (2 * total)
    half = _Z * math.sqrt(share * (1 - share) / total + z2 / (4 * total**2))
    scale = 1 + z2 / total
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def student(mean: float, variance: float, total: int) -> tuple[float, float]:
    """Returns the interval of a mean at LEVEL by Student's t (1908, Biometrika 6:1).

    In constant time, for values that are counted as they arrive. Raises ValueError for fewer than two values.

    Args:
        mean: Mean of the values.
        variance: Their variance, with divisor `total` − 1.
        total: Their number.
    """
    if total < 2:
        raise ValueError(f"{total} values have no variance")
    half = _t_quantile(total - 1) * math.sqrt(variance / total)
    return mean - half, mean + half


def _t_quantile(degrees: int) -> float:
    """Returns the t distribution's quantile at (1 + LEVEL) / 2.

    Exact for one and two degrees of freedom; else the expansion 26.7.5 of Abramowitz and Stegun (1964), which
    is less than 1% too small.
    """
    if degrees == 1:
        return math.tan(math.pi * LEVEL / 2)
    if degrees == 2:
        return LEVEL * math.sqrt(2 / (1 - LEVEL**2))
    z, n = _Z, degrees
    terms = (
        (z**3 + z) / (4 * n),
        (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2),
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3),
    )
    return z + sum(terms)


def bootstrap(values: npt.NDArray[np.float64], seed: int = 0) -> tuple[float, float]:
    """Returns the percentile interval of the mean at LEVEL; `values` has shape [tasks]."""
    rng = np.random.default_rng(seed)
    size = len(values)
    means = np.concatenate(
        [values[rng.integers(size, size=(_CHUNK, size))].mean(axis=1) for _ in range(RESAMPLES // _CHUNK)]
    )
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(means, [tail, 100 - tail])
    return float(low), float(high)

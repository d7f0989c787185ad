"""Compares the rewards of two versions while they arrive, without a sample size set beforehand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ALPHA = 0.01
"""Probability of each of the two errors: to promote a candidate that is worse by more than the margin, and to
roll back one that is not worse."""
LEAST = 20
"""Least number of rewards of each version, from which the normal approximation is used."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Mean rewards of a candidate and of the live version, and bounds of their difference.

    `low` and `high` bound the difference candidate − live, each with probability 1 − ALPHA at all times at
    once; they are infinite before there are LEAST rewards of each version.
    """

    reward: float
    live_reward: float
    episodes: int
    live_episodes: int
    low: float
    high: float

    def promotes(self, margin: float) -> bool | None:
        """Whether the candidate is shown to be worse by less than `margin` (True), or worse (False)."""
        if self.low > -margin:
            return True
        return False if self.high < 0 else None

    def figures(self) -> dict[str, float]:
        """Return the figures for the ledger."""
        names = ("reward", "live_reward", "episodes", "live_episodes")
        return {name: getattr(self, name) for name in names}


def compare(candidate: Sequence[float], live: Sequence[float], scale: float) -> Comparison:
    """Compare the rewards so far.

    The bounds are those of the mixture sequential probability ratio test with a normal mixture of standard
    deviation `scale` (Robbins 1970, Ann. Math. Stat. 41:1397; Johari, Pekelis and Walsh 2015,
    arXiv:1512.04922, section 4): with W the variance of the estimated difference,
    sqrt(2 W (W + scale²) / scale² · log(sqrt((W + scale²) / W) / (2 ALPHA))).

    Args:
        candidate: Rewards of the candidate.
        live: Rewards of the live version.
        scale: Size of the differences that matter, the margin. It affects the duration alone.
    """
    difference = _mean(candidate) - _mean(live)
    if min(len(candidate), len(live)) < LEAST:
        half = math.inf
    else:
        ends = _range([*candidate, *live])
        variance = _variance(candidate, ends) / len(candidate) + _variance(live, ends) / len(live)
        half = _half_width(variance, scale)
    return Comparison(
        _mean(candidate), _mean(live), len(candidate), len(live), difference - half, difference + half
    )


def _half_width(variance: float, scale: float) -> float:
    if variance == 0.0:
        return 0.0
    total = variance + scale**2
    return math.sqrt(2 * variance * total / scale**2 * math.log(math.sqrt(total / variance) / (2 * ALPHA)))


def _mean(rewards: Sequence[float]) -> float:
    return math.fsum(rewards) / len(rewards) if rewards else 0.0


def _range(rewards: Sequence[float]) -> tuple[float, float]:
    """Return the least and the largest reward; 0 and 1 if all are 0, or all are 1."""
    ends = min(rewards), max(rewards)
    return (0.0, 1.0) if ends in ((0.0, 0.0), (1.0, 1.0)) else ends


def _variance(rewards: Sequence[float], ends: tuple[float, float]) -> float:
    """Return the variance with one more reward at either end.

    Without these, a few rewards that happen to be equal would have the variance 0.
    """
    return float(np.var([*rewards, *ends], ddof=1))

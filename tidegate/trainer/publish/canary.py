"""Tests a candidate version on a share of the clients' conversations, and writes the state of the test.

Rewards of two versions are compared while they arrive, without a sample size set beforehand.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tidegate.gateway.client import GroupRow
from tidegate.service.serve import write_atomically

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
        return {
            "reward": self.reward,
            "live_reward": self.live_reward,
            "episodes": self.episodes,
            "live_episodes": self.live_episodes,
        }


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
    values = [*rewards, *ends]
    mean = _mean(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


FILE = "canary.json"
"""State of the test, for readers of the run's directory."""


@dataclass(slots=True)
class CanaryTest:
    """Rewards of the conversations that began since the test and sample from one version alone.

    Args:
        version: The candidate.
        earlier: Ids of the groups that existed when the test began; they are not counted.
    """

    version: int
    earlier: set[str]
    _candidate: dict[str, float] = field(default_factory=dict)
    _live: dict[str, float] = field(default_factory=dict)

    def add(self, groups: Iterable[GroupRow]) -> None:
        """Add the rewards of groups that have ended; one that is listed again counts once."""
        for group in groups:
            newest = group.newest_version
            if group.id in self.earlier or group.reward is None or newest is None:
                continue
            # A conversation with tokens of both versions is evidence about neither.
            if group.oldest_version == newest == self.version:
                self._candidate[group.id] = group.reward
            elif newest < self.version:
                self._live[group.id] = group.reward

    def compare(self, margin: float) -> Comparison:
        return compare([*self._candidate.values()], [*self._live.values()], margin)


@dataclass(slots=True)
class CanaryState:
    """Writes `canary.json` whenever the test has more rewards.

    Args:
        run_dir: Directory of the run.
        margin: `trainer.promotion.margin`.
    """

    run_dir: Path
    margin: float
    _written: tuple[int, Comparison] | None = None

    def write(self, version: int, comparison: Comparison) -> None:
        """Write the test of `version`: means, numbers of rewards, and bounds of the difference once known."""
        if self._written == (version, comparison):
            return
        self._written = version, comparison
        bounds = {"low": comparison.low, "high": comparison.high}
        state = {
            "time": time.time(),
            "version": version,
            "margin": self.margin,
            "least": LEAST,
            **comparison.figures(),
            # JSON has no infinity.
            **{name: bound if math.isfinite(bound) else None for name, bound in bounds.items()},
        }
        write_atomically(self.run_dir / FILE, json.dumps(state))

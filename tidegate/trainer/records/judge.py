"""Costs of a run's judge, and its agreement with the environment's own rewards."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from tidegate.types import Trajectory

PREFIX = "judge/"
"""The metrics that a judge gives an episode begin with it."""
OWN, PART, SECONDS = "judge/environment", "judge", "judge/seconds"
COUNTS = ("calls", "cached", "errors", "prompt_tokens", "completion_tokens")
WINDOW = 256
"""Newest episodes that are compared."""
FEWEST = 64
"""Episodes without which nothing is compared."""
FEWEST_OTHERS = 16
"""Episodes whose own reward is not the most frequent one, without which the agreement is unknown."""
SIGNIFICANT = 3.0
"""Standard errors between the halves of the window above which a mean has changed."""


class JudgeRecord:
    """Collects what the judge reported with each episode."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._seconds: list[float] = []
        self._pairs: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        """The judge's score and the environment's own reward of an episode, the oldest first."""

    def add(self, episodes: Iterable[Trajectory]) -> None:
        """Add episodes that have ended, each once. Those without a judge change nothing."""
        for episode in episodes:
            metrics = episode.metrics
            for name in COUNTS:
                self._counts[name] += int(metrics.get(PREFIX + name, 0))
            if SECONDS in metrics:
                self._seconds.append(metrics[SECONDS])
            if episode.reward is not None and PART in episode.reward_parts and OWN in metrics:
                self._pairs.append((episode.reward_parts[PART], metrics[OWN]))

    def metrics(self) -> dict[str, float]:
        """Return the costs since the last call and the agreement; empty without a judge."""
        if not self._seconds and not self._pairs:
            return {}
        metrics = {PREFIX + name: float(self._counts[name]) for name in COUNTS}
        if self._seconds:
            metrics["time/judge"] = float(np.mean(self._seconds))
        self._counts.clear()
        self._seconds.clear()
        return metrics | self._compared()

    def _compared(self) -> dict[str, float]:
        pairs = np.array(self._pairs, dtype=np.float64).reshape(-1, 2)
        if len(pairs) < FEWEST:
            return {}
        diverging = _changed(pairs[:, 0]) > SIGNIFICANT and _changed(pairs[:, 1]) < -SIGNIFICANT
        metrics = {"judge/diverging": float(diverging)}
        _, counts = np.unique(pairs[:, 1], return_counts=True)
        # Of nearly equal rewards, a few pairs would decide the agreement.
        if len(pairs) - counts.max() < FEWEST_OTHERS:
            return metrics
        return metrics | {"judge/agreement": somers_d(pairs[:, 0], pairs[:, 1])}


def somers_d(scores: npt.NDArray[np.float64], rewards: npt.NDArray[np.float64]) -> float:
    """Return Somers' D (1962): over the pairs with different rewards, the share of those that the scores
    order alike, less the share that they order otherwise. It does not depend on how frequent a reward is.

    Raises:
        ValueError: All rewards are equal.
    """
    better = rewards[:, None] > rewards[None, :]
    if not better.any():
        raise ValueError("equal rewards have no order")
    return float(np.sign(scores[:, None] - scores[None, :])[better].mean())


def spearman(first: npt.NDArray[np.float64], second: npt.NDArray[np.float64]) -> float | None:
    """Return the rank correlation, equal values having their mean rank; None if a side does not vary."""
    sides = [ranks(first), ranks(second)]
    if any(np.ptp(side) == 0 for side in sides):
        return None
    return float(np.corrcoef(sides[0], sides[1])[0, 1])


def ranks(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the ranks from 1, equal values having their mean rank; shape [values]."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    means: npt.NDArray[np.float64] = (ends - (counts - 1) / 2)[inverse]
    return means


def _changed(values: npt.NDArray[np.float64]) -> float:
    """Return the difference between the means of the newer and the older half, in standard errors."""
    half = len(values) // 2
    older, newer = values[:half], values[half:]
    error = float(np.sqrt(older.var() / len(older) + newer.var() / len(newer)))
    return 0.0 if error == 0 else float(newer.mean() - older.mean()) / error

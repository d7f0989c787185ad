"""Running mean reward of the episodes of each key: a baseline for episodes without a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

MEMORY = 1000
"""Number of episodes after which later ones replace earlier ones, as the policy improves."""


class RunningMeans:
    """Mean reward and number of the episodes of each key so far; the number counts up to MEMORY."""

    def __init__(self) -> None:
        self._means: dict[str, tuple[float, float]] = {}
        """Number and mean by key."""
        self._before: dict[str, tuple[float, float] | None] = {}
        """Those of the last batch's keys before it was counted."""

    def baselines(self, keys: Sequence[str], rewards: Sequence[float]) -> list[float]:
        """Return the mean of the key's other episodes for each episode of a batch, and count the batch.

        The other episodes are those of earlier batches and of this one. A reward is not part of its own
        baseline, which would bias the gradient: b_i = (n·m + Σ_{j≠i} r_j) ÷ (n + c − 1), with the number n
        and mean m of the key's earlier episodes and the rewards r of its c episodes in the batch. The
        baseline of a key's first episode is its own reward.

        Args:
            keys: Key of each episode.
            rewards: Reward of each episode.
        """
        totals: dict[str, tuple[float, float]] = {}
        for key, reward in zip(keys, rewards, strict=True):
            number, total = totals.get(key) or self._total(key)
            totals[key] = number + 1, total + reward
        found = []
        for key, reward in zip(keys, rewards, strict=True):
            number, total = totals[key]
            found.append(reward if number == 1 else (total - reward) / (number - 1))
        self._before = {key: self._means.get(key) for key in totals}
        for key, (number, total) in totals.items():
            self._means[key] = min(number, MEMORY), total / number
        return found

    def uncount(self) -> None:
        """Forget the batch that was counted last, whose step was skipped."""
        for key, value in self._before.items():
            if value is None:
                del self._means[key]
            else:
                self._means[key] = value
        self._before = {}

    def _total(self, key: str) -> tuple[float, float]:
        number, mean = self._means.get(key, (0.0, 0.0))
        return number, number * mean

    def state(self) -> dict[str, list[float]]:
        """Return the state for a checkpoint's marker."""
        return {key: list(value) for key, value in self._means.items()}

    def restore(self, state: Mapping[str, Sequence[float]]) -> None:
        """Continue from a checkpoint's state."""
        self._before = {}
        self._means = {key: (number, mean) for key, (number, mean) in state.items()}

"""Credit: what each episode of a batch is trained at, from rewards to advantages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tidegate.config import TrainerSettings
from tidegate.trainer.batch.advantage import batch_deviation, centred, group_deviation, scaled
from tidegate.types import Group, Outcome, Trajectory

Advantage = float | list[float] | None
"""Of an episode: that of all its tokens, or one for each of its turns; None: it is not trained on."""
Credit = Callable[[Sequence[Group]], list[list[Advantage]]]
"""The groups of a batch → the advantage of every trajectory, by group."""


@dataclass(frozen=True, slots=True)
class GroupCredit:
    """Credit against the other attempts at the same task (GRPO).

    A turn is worth what came after it: the episode's reward, and the rewards of this turn and of those
    after it. Its advantage is that less the group's mean at the same turn, ÷ a standard deviation. Where
    no single turn was rewarded, all turns of an episode have the same one, and it is GRPO's.
    """

    settings: TrainerSettings

    def __call__(self, groups: Sequence[Group]) -> list[list[Advantage]]:
        apart = [centred(self._returns(group)) for group in groups]
        if self.settings.scale == "none":
            return [self._by_episode(*both) for both in zip(groups, apart, strict=True)]
        whole = batch_deviation(apart)
        deviations = [group_deviation(one) if self.settings.scale == "group" else whole for one in apart]
        advantages = [scaled(*both) for both in zip(apart, deviations, strict=True)]
        return [self._by_episode(*both) for both in zip(groups, advantages, strict=True)]

    def keeps(self, group: Group) -> bool:
        """Whether a ready group is trained on. Under dynamic sampling one whose advantages are all 0 is
        replaced by another, and one of which no episode is trained on always is."""
        trained = [one for one in self._by_episode(group, centred(self._returns(group))) if one is not None]
        return bool(trained) and (not self.settings.dynamic_sampling or any(map(np.any, trained)))

    def _returns(self, group: Group) -> npt.NDArray[np.float64]:
        """[episodes, turns]: what came from each turn on. Episodes end in their reward alone."""
        turns = max(len(one.turns) for one in group.trajectories)
        found = np.zeros((len(group.trajectories), max(1, turns)))
        for returns, one in zip(found, group.trajectories, strict=True):
            rewards = np.array([turn.reward for turn in one.turns])
            returns[: len(rewards)] = rewards[::-1].cumsum()[::-1]
            returns += float(one.reward or 0.0) - self._length_penalty(one)
        return found

    def _length_penalty(self, trajectory: Trajectory) -> float:
        """0 up to the first of the two lengths, 1 from the second on, linear in between: DAPO's soft overlong
        punishment (Yu et al., 2025, eq. 13), over the tokens that the episode sampled."""
        if self.settings.length_penalty is None:
            return 0.0
        first, last = self.settings.length_penalty
        return float(np.clip((trajectory.sampled_tokens() - first) / (last - first), 0.0, 1.0))

    def _by_episode(self, group: Group, advantages: npt.NDArray[np.float64]) -> list[Advantage]:
        return [
            None if self._is_masked(one) else _told(values[: len(one.turns)].tolist())
            for one, values in zip(group.trajectories, advantages, strict=True)
        ]

    def _is_masked(self, trajectory: Trajectory) -> bool:
        """A truncated episode's reward counts in its group, but it is not trained on (DAPO's overlong
        filtering, §3.4)."""
        return self.settings.truncated_episodes == "mask" and trajectory.outcome == Outcome.TRUNCATED


def _told(by_turn: list[float]) -> float | list[float]:
    if not by_turn:
        return 0.0
    return by_turn if any(one != by_turn[0] for one in by_turn) else by_turn[0]

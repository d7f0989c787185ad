"""Credit assignment: computes the advantage of each episode of a batch from rewards.

The advantage is the return of an episode relative to the other attempts at the same task. Returns and
advantages of a group are float64 [episodes, turns]. Without rewards of single turns all columns are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from tidegate.config import TrainerSettings
from tidegate.trainer.batch.rows import is_trained
from tidegate.types import Group, Outcome, Trajectory

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


Advantage = float | list[float] | None
"""Advantage of all of an episode's tokens, or a list with one per turn; None: not trained on."""
CreditAssignment = Callable[[Sequence[Group]], list[list[Advantage]]]
"""Groups of a batch → advantages of their trajectories, by group."""

MAX_RETURN = 1e15
"""Squares of larger returns exceed float32, and make every advantage of their batch NaN or 0."""


def faulty_reward(group: Group) -> str | None:
    """Return which reward of a group cannot be trained on, None if all can: a batch has none of these."""
    for trajectory in group.trajectories:
        rewards = [trajectory.reward or 0.0, *trajectory.policy_rewards.values()]
        size = sum(map(abs, rewards)) + sum(abs(turn.reward) for turn in trajectory.turns)
        # Not `size > MAX_RETURN`, which is false for NaN.
        if not size <= MAX_RETURN:
            return f"the rewards of episode {trajectory.session_id} add up to {size:g}, beyond {MAX_RETURN:g}"
    return None


MEMORY = 1000
"""Number of episodes after which later ones replace earlier ones, as the policy improves."""


class RunningMeans:
    """Mean reward and number of the episodes of each key so far; the number counts up to MEMORY.

    A baseline for episodes without a group.
    """

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


@dataclass(frozen=True, slots=True)
class BaselineCredit:
    """Credit relative to the other attempts at the same task (GRPO, RLOO), to the batch (REINFORCE++) or to
    earlier episodes of the same key.

    The return of a turn is the episode's reward plus the rewards of this and all later turns. Its advantage
    is the return minus the baseline's mean at the same turn, ÷ a standard deviation. Without rewards of
    single turns all turns of an episode have the same advantage. With a teacher it is multiplied by
    `trainer.teacher.reward_weight`; the loss adds the teacher's part of each token's advantage.
    """

    settings: TrainerSettings
    means: RunningMeans = field(default_factory=RunningMeans)
    """State of the baseline `key`."""

    def __call__(self, groups: Sequence[Group]) -> list[list[Advantage]]:
        if self.settings.teacher.alone:
            advantages = [np.zeros_like(self._returns(group)) for group in groups]
        else:
            rewarded = _by_policy(groups, self._of_rewards)
            advantages = [self.settings.teacher.reward_weight * group for group in rewarded]
        return [self._by_episode(*pair) for pair in zip(groups, advantages, strict=True)]

    def _of_rewards(self, groups: Sequence[Group]) -> list[npt.NDArray[np.float64]]:
        if self.settings.baseline == "batch":
            merged = Group("", "", [trajectory for group in groups for trajectory in group.trajectories])
            ends = np.cumsum([len(group.trajectories) for group in groups])[:-1]
            advantages = np.split(centred(self._returns(merged)), ends)
        elif self.settings.baseline == "key":
            advantages = self._against_means(groups)
        else:
            advantages = [centred(self._returns(group)) for group in groups]
        if self.settings.scale == "group":
            advantages = [scaled(group, group_deviation(group)) for group in advantages]
        elif self.settings.scale != "none":
            deviation = batch_deviation(advantages)
            advantages = [scaled(group, deviation) for group in advantages]
        if self.settings.baseline == "leave_one_out":  # last: the deviation is that of the rewards
            advantages = [leave_one_out(group) for group in advantages]
        return advantages

    def _against_means(self, groups: Sequence[Group]) -> list[npt.NDArray[np.float64]]:
        """Return the groups' returns minus the running mean of their client's key or their task."""
        returns = [self._returns(group) for group in groups]
        sizes = [len(group.trajectories) for group in groups]
        keys = [group.client or group.task_id for group in groups]
        # The return from the first turn on has all rewards of the episode.
        rewards = np.concatenate([values[:, 0] for values in returns])
        if not np.isfinite(rewards).all():
            raise ValueError(f"returns must be finite numbers, not {rewards.tolist()}")
        baselines = np.array(self.means.baselines(np.repeat(keys, sizes).tolist(), rewards.tolist()))
        split = np.split(baselines, np.cumsum(sizes)[:-1])
        return [values - own[:, None] for values, own in zip(returns, split, strict=True)]

    def should_train(self, group: Group) -> bool:
        """Whether to train on a ready group.

        Groups without a token to train on are always replaced; under dynamic sampling also those whose
        rewards are all equal.
        """
        (values,) = _by_policy([group], lambda groups: [centred(self._returns(one)) for one in groups])
        advantages = self._by_episode(group, values)
        trained = [
            advantage
            for trajectory, advantage in zip(group.trajectories, advantages, strict=True)
            if advantage is not None and any(map(is_trained, trajectory.turns))
        ]
        return bool(trained) and (not self.settings.filters_equal_rewards or any(map(np.any, trained)))

    def _returns(self, group: Group) -> npt.NDArray[np.float64]:
        """Return the returns of a group's episodes from each turn on, float64 [episodes, turns]."""
        returns = np.zeros((len(group.trajectories), max(1, _most_turns(group))))
        for row, trajectory in zip(returns, group.trajectories, strict=True):
            rewards = np.array([turn.reward for turn in trajectory.turns])
            row[: len(rewards)] = rewards[::-1].cumsum()[::-1]
            row += float(trajectory.reward or 0.0) - self._length_penalty(trajectory)
        return returns

    def _length_penalty(self, trajectory: Trajectory) -> float:
        """Return 0 up to the first of the two lengths, 1 from the second on, and linear in between.

        This is DAPO's soft overlong punishment (Yu et al., 2025, eq. 13), over the episode's sampled tokens.
        """
        if self.settings.length_penalty is None:
            return 0.0
        first, last = self.settings.length_penalty
        return float(np.clip((trajectory.sampled_tokens() - first) / (last - first), 0.0, 1.0))

    def _by_episode(self, group: Group, advantages: npt.NDArray[np.float64]) -> list[Advantage]:
        return [
            None if self._is_masked(trajectory) else _collapsed(values[: len(trajectory.turns)].tolist())
            for trajectory, values in zip(group.trajectories, advantages, strict=True)
        ]

    def _is_masked(self, trajectory: Trajectory) -> bool:
        """Whether a truncated episode counts in its group's mean only (DAPO's overlong filtering, §3.4)."""
        return self.settings.truncated_episodes == "mask" and trajectory.outcome == Outcome.TRUNCATED


def _by_policy(
    groups: Sequence[Group], compute: Callable[[Sequence[Group]], list[npt.NDArray[np.float64]]]
) -> list[npt.NDArray[np.float64]]:
    """Compute advantages for each policy as if its turns were the episodes' only ones.

    An episode's reward is then the policy's own, if it has one, and an episode without a turn of the policy
    counts in none of its means.

    Returns:
        The advantages of the groups' turns, float64 [episodes, turns] each; 0 of those not trained on.
    """
    names = {turn.policy for group in groups for one in group.trajectories for turn in one.trainable_turns()}
    if names <= {""}:
        return compute(groups)
    found = [np.zeros((len(group.trajectories), max(1, _most_turns(group)))) for group in groups]
    for name in sorted(names):
        views, places = [], []
        for group, values in zip(groups, found, strict=True):
            turns = [[turn for turn in one.turns if turn.policy == name] for one in group.trajectories]
            rows = [row for row, own in enumerate(turns) if own]
            # Without the others' turns: their rewards are no consequence of what this policy did.
            episodes = [
                replace(one, turns=turns[row], reward=one.policy_rewards.get(name, one.reward))
                for row, one in enumerate(group.trajectories)
                if row in rows
            ]
            if episodes:
                views.append(replace(group, trajectories=episodes))
                places.append([(values[row], _indices(group.trajectories[row], name)) for row in rows])
        for place, computed in zip(places, compute(views), strict=True):
            for (row_values, indices), own_values in zip(place, computed, strict=True):
                row_values[indices] = own_values[: len(indices)]
    return found


def _indices(trajectory: Trajectory, policy: str) -> list[int]:
    return [at for at, turn in enumerate(trajectory.turns) if turn.policy == policy]


def _most_turns(group: Group) -> int:
    return max(len(trajectory.turns) for trajectory in group.trajectories)


def _collapsed(by_turn: list[float]) -> float | list[float]:
    """Return one value if all are equal."""
    if not by_turn:
        return 0.0
    return by_turn if any(value != by_turn[0] for value in by_turn) else by_turn[0]

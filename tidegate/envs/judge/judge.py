"""Adds a judge's scores to the rewards of episodes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from tidegate.envs.judge.prompts import prompt_of, shown
from tidegate.envs.judge.verdicts import Verdicts
from tidegate.settings.judge import JudgeSettings
from tidegate.types import Scored, Task, Trajectory

PART = "judge"
"""Name of the reward part; those of criteria are `judge_<criterion>`."""
OWN = "judge/environment"
"""Metric of an episode: the environment's own reward, with which the judge is compared."""


class RewardJudge:
    """A judge of episodes, or of the episodes of a group.

    Args:
        settings: The judge, with its rubric resolved.
        cache: Database of its replies; None: in memory.
    """

    def __init__(self, settings: JudgeSettings, cache: Path | None = None) -> None:
        self._settings = settings
        self._verdicts = Verdicts(settings, cache)
        self._shares = settings.shares()
        self.ranks = settings.kind == "ranking"
        """Whether it compares the episodes of a group."""
        self.names = [PART, *(f"{PART}_{name}" for name in settings.criteria)]
        """Names of its reward parts."""

    async def close(self) -> None:
        await self._verdicts.close()

    async def score(self, task: Task, trajectory: Trajectory, own: Scored | None) -> Scored:
        """Returns an episode's reward: the environment's own, and the judge's score.

        Episodes of evaluations have the environment's own reward alone, if it has one. An episode of a group
        that will be ranked gets the judge's part with its group (`rank`).

        Args:
            task: The task with its answer.
            trajectory: The episode.
            own: The environment's own reward; None: it has none.

        Raises:
            RewardError: The judge gave no valid verdict.
        """
        if own is not None and trajectory.split == "eval":
            return own
        if self.ranks and trajectory.group_id is not None and trajectory.split == "train":
            return self._weighted(own)
        parts, metrics = await self._judged(task, [shown(task, trajectory)], trajectory.group_id)
        base, judged = self._weighted(own), self._settings.weight * parts[0][PART]
        return Scored(
            base.reward + judged,
            {**base.parts, **parts[0]},
            {**base.metrics, **metrics},
            base.turn_rewards,
            {name: value + judged for name, value in base.policy_rewards.items()},
        )

    async def rank(self, task: Task, trajectories: Sequence[Trajectory]) -> list[Scored]:
        """Returns what the ranking adds to the reward, the parts and the metrics of a group's episodes.

        Equal attempts are shown once and have equal scores. The costs are those of the first episode.

        Raises:
            RewardError: The judge gave no valid verdict.
        """
        texts = [shown(task, trajectory) for trajectory in trajectories]
        distinct = list(dict.fromkeys(texts))
        parts, metrics = await self._judged(task, distinct, trajectories[0].group_id)
        of = dict(zip(distinct, parts, strict=True))
        weight = self._settings.weight
        return [
            Scored(weight * of[text][PART], of[text], metrics if number == 0 else {})
            for number, text in enumerate(texts)
        ]

    async def _judged(
        self, task: Task, work: Sequence[str], group: str | None
    ) -> tuple[list[dict[str, float]], dict[str, float]]:
        """Returns the reward parts of each attempt, and the costs as metrics."""
        scores, metrics = await self._verdicts.scores(prompt_of(self._settings, task, work), group)
        if self.ranks:
            return [{PART: value} for value in scores.values()], metrics
        return [self._parts(scores)], metrics

    def _parts(self, scores: Mapping[str, float]) -> dict[str, float]:
        if not self._shares:
            return {PART: next(iter(scores.values()))}
        mean = math.fsum(share * scores[name] for name, share in self._shares.items())
        return {PART: mean, **{f"{PART}_{name}": scores[name] for name in self._shares}}

    def _weighted(self, own: Scored | None) -> Scored:
        if own is None:
            return Scored(0.0, {})
        factor = self._settings.environment_weight
        turns = {turn: factor * value for turn, value in own.turn_rewards.items() if factor}
        metrics = {**own.metrics, OWN: own.reward + math.fsum(own.turn_rewards.values())}
        policies = {name: factor * value for name, value in own.policy_rewards.items()}
        return Scored(factor * own.reward, own.parts, metrics, turns, policies)

"""Environments with and without rewards of their own, for the tests of judges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tidegate.envs.base import Environment
from tidegate.envs.rewards import Reward
from tidegate.types import Task

TASK = Task("t", "plain", [{"role": "user", "content": "Say a number."}])


def short(output: str | None) -> float:
    if output == "broken":
        raise ValueError("no verifier")
    return float(len(output or "") < 6)


class Plain(Environment):
    """Without rewards."""

    name = "plain"

    def train_task(self, index: int) -> Task:
        return Task("t", self.name, TASK.messages)

    def eval_sets(self) -> Mapping[str, Sequence[Task]]:
        return {"": [self.train_task(0)]}


class Verified(Plain):
    """With a reward of its own."""

    name = "verified"
    rewards = (Reward("short", short),)


class Clashing(Plain):
    rewards = (Reward("judge", short),)

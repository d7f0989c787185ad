"""The environment of `benchmarks/rewards.py`: its reward does what the agent's output says."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence

from tidegate.envs.base import Environment
from tidegate.envs.rewards import Reward
from tidegate.types import Task


def act(output: str | None) -> float:
    """`sleep S` waits, `work N` computes, `lock` holds the interpreter's lock for hours."""
    word, _, argument = (output or "").partition(" ")
    if word == "sleep":
        time.sleep(float(argument))
    elif word == "work":
        sum(number * number for number in range(int(argument)))
    elif word == "lock":
        re.match(r"(a+)+$", "a" * 60 + "b")
    return 1.0


class Acting(Environment):
    name = "acting"
    rewards = (Reward("act", act),)

    def train_task(self, index: int) -> Task:
        return Task(f"t{index}", self.name, [{"role": "user", "content": "?"}])

    def eval_sets(self) -> Mapping[str, Sequence[Task]]:
        return {"": [self.train_task(0)]}

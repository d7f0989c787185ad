"""An environment whose reward does what the agent's output says; for `rewards.py`."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping, Sequence

from tidegate.envs.base import Environment
from tidegate.envs.rewards import Reward
from tidegate.types import Task

TASK = Task("act", "acting", [])


def act(output: str) -> float:
    word, _, argument = output.partition(" ")
    match word:
        case "sleep":
            time.sleep(float(argument))
        case "compute":
            sum(number * number for number in range(int(argument)))
        case "lock":
            ctypes.PyDLL(None).sleep(int(argument))  # unlike CDLL, it keeps the interpreter's lock
    return 1.0


class Acting(Environment):
    name = "acting"
    rewards = (Reward("act", act),)

    def train_task(self, index: int) -> Task:
        return TASK

    def eval_sets(self) -> Mapping[str, Sequence[Task]]:
        return {"": [TASK]}

"""The demo's problems as a finite set: 500 training tasks in epochs, and the demo's held-out ones."""

from __future__ import annotations

from typing import ClassVar

from tidegate.envs.arithmetic import Arithmetic
from tidegate.envs.datasets.finite import Finite

SIZE = 500


class Arithmetic500(Finite):
    """The first 500 training tasks of `arithmetic`.

    Args:
        seed: Determines the tasks and the order of the epochs.
    """

    name: ClassVar[str] = Arithmetic.name
    rewards = Arithmetic.rewards

    def __init__(self, seed: int = 0) -> None:
        whole = Arithmetic(seed)
        self._set_tasks([whole.train_task(index) for index in range(SIZE)], whole.eval_sets(), seed)

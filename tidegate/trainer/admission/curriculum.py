"""Curriculum: estimates the solve rate of each task, and decides which tasks are skipped.

The solve rate of a task has a Beta distribution, from the groups of the task and of all tasks of its kind
that have ended. How much the task's own groups count is chosen by what predicted the ended groups best. The
distribution gives the probability that the rewards of a new group differ, so that the group is not filtered.
With the curriculum `difficulty`, a task is always issued if this probability is as high as for a task
without a record; otherwise less often, but with at least the probability `floor`. The order of the tasks
stays that of the environment; some of them are skipped.

The decision about an index depends on the ledger and the seed alone, so a resumed run makes the same
decisions as the killed one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, field
from math import log
from random import Random

from tidegate.trainer.ledger.state import LedgerItem
from tidegate.types import Task

TASK_MEMORY = 0.25
"""Factor of a task's earlier episodes at each further group, as the policy improves."""
KIND_MEMORY = 0.8
"""Factor of a kind's earlier episodes at each step."""
OWN_WEIGHTS = (0.0, 0.125, 0.5, 2.0, 8.0)
"""Weights among which that of a task's own episodes is chosen."""
LOSS_MEMORY = 0.98
"""Factor of the prediction losses of earlier groups at each further group."""
SHARPNESS = 3
"""Exponent of P ÷ U in the probability of issuing a task; P is the probability that the rewards of its group
differ, and U that of a task without a record."""
PRIOR_EPISODES = 4.0
"""Number of episodes for which a kind's solve rate counts in the estimate of one of its tasks."""


@dataclass(slots=True)
class SolveRecord:
    """Episodes of a task or of a kind by their result; earlier ones count for less."""

    solved: float = 0.0
    failed: float = 0.0
    step: int = 0
    """Steps of the run at the last group."""

    def add(self, solved: int, failed: int, memory: float, step: int) -> None:
        self.solved = memory * self.solved + solved
        self.failed = memory * self.failed + failed
        self.step = step


UNKNOWN = SolveRecord()


@dataclass(slots=True)
class Curriculum:
    """Solve records of tasks and kinds, and the decisions that follow from them.

    Args:
        floor: Least probability with which a task is issued.
        group_size: Number of episodes of a group.
        seed: Seed of the decisions.
    """

    floor: float
    group_size: int
    seed: int
    _: KW_ONLY
    step: int = 0
    """Steps taken so far."""
    skipped: int = 0
    """Tasks that were skipped."""
    issued: int = 0
    expected: float = 0.0
    """Expected number of the issued tasks whose groups have different rewards."""
    tasks: dict[str, SolveRecord] = field(default_factory=dict)
    kinds: dict[str, SolveRecord] = field(default_factory=dict)
    losses: list[float] = field(default_factory=lambda: [0.0] * len(OWN_WEIGHTS))
    """Log loss of the predictions whether a group's rewards differ, with each of `OWN_WEIGHTS`; recent groups
    count for more."""

    @property
    def own_weight(self) -> float:
        """Weight of a task's own episodes; those of its kind count beside them as `PRIOR_EPISODES`."""
        return OWN_WEIGHTS[self.losses.index(min(self.losses))]

    def accepts(self, index: int, task: Task) -> bool:
        """Decide whether to issue the task at an index, or to pass it over."""
        informative = self.informative(task.id, task.kind)
        unknown = 1.0 - 2.0 / (self.group_size + 1)
        drawn = Random(f"curriculum/{self.seed}/{index}").random()
        if drawn >= max(self.floor, (informative / unknown) ** SHARPNESS):
            self.skipped += 1
            return False
        self.issued += 1
        self.expected += informative
        return True

    def informative(self, task: str, kind: str) -> float:
        """Return the probability that the rewards of a new group of the task differ."""
        return self._differ(*self.estimate(task, kind, self.own_weight, self.step))

    def _differ(self, solved: float, failed: float) -> float:
        """With p ~ Beta(a, b) and n episodes it is 1 − E[pⁿ] − E[(1 − p)ⁿ]."""
        all_solved = all_failed = 1.0
        for number in range(self.group_size):
            total = solved + failed + number
            all_solved *= (solved + number) / total
            all_failed *= (failed + number) / total
        return 1.0 - all_solved - all_failed

    def estimate(self, task: str, kind: str, own_weight: float, step: int) -> tuple[float, float]:
        """Return a and b of the Beta distribution of a task's solve rate after `step` steps.

        Its prior has the mean of the kind's record, which begins as Beta(1, 1).
        """
        own, whole = self.tasks.get(task, UNKNOWN), self.kinds.get(kind, UNKNOWN)
        memory = KIND_MEMORY ** (step - whole.step)
        a, b = 1.0 + memory * whole.solved, 1.0 + memory * whole.failed
        weight = min(PRIOR_EPISODES, a + b) / (a + b)
        return weight * a + own_weight * own.solved, weight * b + own_weight * own.failed

    def observe(self, task: str, kind: str, solved: int, episodes: int, step: int) -> None:
        """Add a group that ended when `step` steps were taken."""
        if task in self.tasks:  # else the predictions are all equal
            differ = 0 < solved < episodes
            for place, weight in enumerate(OWN_WEIGHTS):
                predicted = self._differ(*self.estimate(task, kind, weight, step))
                loss = -log(max(1e-3, predicted if differ else 1 - predicted))
                self.losses[place] = LOSS_MEMORY * self.losses[place] + loss
        own, whole = self.tasks.setdefault(task, SolveRecord()), self.kinds.setdefault(kind, SolveRecord())
        own.add(solved, episodes - solved, TASK_MEMORY, step)
        whole.add(solved, episodes - solved, KIND_MEMORY ** (step - whole.step), step)

    def restore(self, groups: Iterable[LedgerItem]) -> None:
        """Add the groups of a ledger in the order of their ends, without those that ended in lost steps: they
        continue, or their tasks are issued again."""
        for group in sorted(groups, key=lambda group: group.ended_at):
            issued = group.issued
            if group.solved is not None and not group.after_marker and "index" in issued:
                kind = issued.get("task_kind", "")
                self.observe(issued["task"], kind, group.solved, group.episodes, group.steps_taken)

    def metrics(self) -> dict[str, float]:
        """Return counts since the start or resume; none if every task is issued."""
        if self.floor == 1:
            return {}
        return {
            "curriculum/skipped": float(self.skipped),
            **({"curriculum/informative": self.expected / self.issued} if self.issued else {}),
        }

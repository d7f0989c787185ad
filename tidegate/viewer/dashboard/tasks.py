"""Solve rates of a run's training tasks and of their kinds, from the ledger."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fastapi import Query

from tidegate.evaluation.stats import wilson
from tidegate.trainer.ledger.state import LedgerItem
from tidegate.viewer.chart import STEP, Chart, Form, Series, Tone, lines
from tidegate.viewer.dashboard.run import FollowedRun, Number
from tidegate.viewer.formatting import printable, smoothed

Sort = Literal["hardest", "easiest", "newest", "groups"]
Most = Annotated[int, Query(ge=1, le=500)]
Text = Annotated[str, Query(max_length=500)]

STYLES: tuple[tuple[Tone, Form], ...] = (
    ("accent", "line"), ("sand", "line"), ("ink", "line"), ("warn", "line"),
    ("accent", "dash"), ("sand", "dash"), ("ink", "dash"), ("warn", "dash"),
)  # fmt: skip
"""Of the kinds in the chart, the most frequent ones."""


@dataclass(slots=True)
class TaskSolves:
    """The groups of a task, or of a kind of tasks, and how many of their episodes solved it."""

    name: str
    kind: str
    groups: int = 0
    solved: int = 0
    episodes: int = 0
    states: Counter[str] = field(default_factory=Counter)
    newest: str = ""
    """The group that was issued last."""
    step: int | None = None
    """The step of the newest group that was leased."""

    def add(self, group_id: str, item: LedgerItem, committed: float) -> None:
        self.groups += 1
        self.states[item.final(committed).value] += 1
        self.newest = group_id
        if (solved := item.end.get("solved")) is not None:
            self.solved += solved
            self.episodes += item.end.get("episodes", 0)
            self.step = item.end.get("step", item.steps_taken + 1)

    @property
    def rate(self) -> float | None:
        return self.solved / self.episodes if self.episodes else None

    def to_wire(self) -> dict[str, Any]:
        low, high = wilson(self.solved, self.episodes) if self.episodes else (None, None)
        return {
            "name": printable(self.name), "kind": printable(self.kind), "groups": self.groups,
            "solved": self.solved, "episodes": self.episodes, "rate": self.rate, "low": low, "high": high,
            "states": self.states.most_common(), "newest": printable(self.newest), "step": self.step,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class SolveRates:
    tasks: dict[str, TaskSolves]
    kinds: dict[str, TaskSolves]
    chart: Chart | None


def tasks(
    run: FollowedRun,
    sort: Sort = "hardest",
    text: Text = "",
    kind: str = "",
    start: Number = 0,
    most: Most = 100,
) -> dict[str, Any]:
    """Returns the tasks whose id contains a text, the kinds, and the solve rate of kinds by step.

    A group counts as `groups` when it is issued, and with its episodes when it was leased.
    """
    rates: SolveRates = run.cached("tasks", lambda: _collect(run))
    wanted = text.casefold()
    found = [
        record
        for record in rates.tasks.values()
        if (not kind or record.kind == kind) and wanted in record.name.casefold()
    ]
    page = _sorted(found, sort)[start : start + most]
    return {
        "total": len(found),
        "all": len(rates.tasks),
        "tasks": [record.to_wire() for record in page],
        "kinds": [record.to_wire() for record in _sorted(rates.kinds.values(), "groups")],
        "chart": rates.chart,
    }


def _collect(run: FollowedRun) -> SolveRates:
    by_task: dict[str, TaskSolves] = {}
    by_kind: dict[str, TaskSolves] = {}
    steps: dict[str, dict[int, list[int]]] = defaultdict(dict)
    for group_id, item in run.ledger.groups.items():
        task, kind = str(item.issued.get("task") or ""), str(item.issued.get("task_kind") or "")
        for records, name in ((by_task, task), (by_kind, kind)):
            records.setdefault(name, TaskSolves(name, kind)).add(group_id, item, run.committed)
        if (solved := item.end.get("solved")) is not None and (episodes := item.end.get("episodes", 0)):
            sums = steps[kind].setdefault(item.end.get("step", item.steps_taken + 1), [0, 0])
            sums[0] += solved
            sums[1] += episodes
    return SolveRates(by_task, by_kind, _chart(steps))


def _chart(steps: dict[str, dict[int, list[int]]]) -> Chart | None:
    frequent = sorted(steps, key=lambda kind: -sum(episodes for _, episodes in steps[kind].values()))
    series = []
    for kind, (tone, form) in zip(frequent, STYLES, strict=False):
        at = sorted(steps[kind])
        rates = smoothed([steps[kind][step][0] / steps[kind][step][1] for step in at])
        points = [(float(step), rate) for step, rate in zip(at, rates, strict=True)]
        series.append(Series(printable(kind) or "all tasks", points, tone, form))
    axes = (STEP, "solved episodes, share")
    note = "Smoothed. Over the groups that the trainer leased, also the filtered ones."
    return lines(
        "Solve rate by kind of task", series, note=note, axes=axes, y_range=(0.0, 1.0), size=(960, 280)
    )


def _sorted(records: Iterable[TaskSolves], sort: Sort) -> list[TaskSolves]:
    """Tasks without a rate come last; of equal ones those with more groups come first."""
    found = list(records)
    if sort == "newest":
        return found[::-1]
    if sort == "groups":
        return sorted(found, key=lambda record: -record.groups)
    sign = 1.0 if sort == "hardest" else -1.0
    return sorted(
        found,
        key=lambda record: (record.rate is None, sign * (record.rate or 0.0), -record.episodes),
    )

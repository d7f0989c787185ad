"""The curriculum: estimates, decisions, and that a resumed run makes the decisions of the killed one."""

from __future__ import annotations

import math
import random
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.trainer.learning_fixtures import make_trajectory, make_turn
from tidegate.config import load_settings
from tidegate.trainer.admission.core import Admission
from tidegate.trainer.admission.curriculum import Curriculum
from tidegate.trainer.admission.rules import Rules
from tidegate.trainer.checkpoint.checkpoint import Checkpoint
from tidegate.trainer.ledger.entries import LedgerEntry
from tidegate.trainer.ledger.state import LedgerState
from tidegate.trainer.resume import restore_admission
from tidegate.trainer.start import Start
from tidegate.types import Group, Outcome, Task

SIZE = 8


def curriculum(floor: float = 0.05, seed: int = 0) -> Curriculum:
    return Curriculum(floor, SIZE, seed)


def task(id: str, kind: str = "k") -> Task:
    return Task(id, "env", [], info={"kind": kind})


def with_rewards(*rewards: float) -> Group:
    members = [make_trajectory([make_turn(0, None, [1], [2])]) for _ in rewards]
    for trajectory, reward in zip(members, rewards, strict=True):
        trajectory.reward = reward
    return Group("g", "t", members)


def test_an_unknown_task_has_a_uniform_solve_rate() -> None:
    assert curriculum().estimate("t", "k", 1.0, 0) == (1.0, 1.0)
    assert curriculum().informative("t", "k") == pytest.approx(1 - 2 / (SIZE + 1))


@given(st.lists(st.tuples(st.integers(0, SIZE), st.booleans()), max_size=6))
def test_the_probability_is_that_of_a_beta_binomial_distribution(groups: list[tuple[int, bool]]) -> None:
    tasks = curriculum()
    for solved, own in groups:
        tasks.observe("t" if own else "other", "k", solved, SIZE, 0)
    a, b = tasks.estimate("t", "k", tasks.own_weight, 0)
    beta = lambda x, y: math.exp(math.lgamma(x) + math.lgamma(y) - math.lgamma(x + y))  # noqa: E731
    alike = (beta(a + SIZE, b) + beta(a, b + SIZE)) / beta(a, b)
    assert tasks.informative("t", "k") == pytest.approx(1 - alike, abs=1e-9)


def test_tasks_with_undecided_outcomes_are_the_most_informative() -> None:
    tasks = curriculum()
    for name, solved in (("easy", SIZE), ("middle", SIZE // 2), ("hard", 0)):
        tasks.observe(name, name, solved, SIZE, 0)
    easy, middle, hard = (tasks.informative(name, name) for name in ("easy", "middle", "hard"))
    assert middle > 0.85
    assert easy == pytest.approx(hard)
    assert easy < 0.4


def test_the_last_group_counts_most_and_the_kind_is_the_prior_of_a_new_task() -> None:
    tasks = curriculum()
    for solved in (0, 0, SIZE, SIZE):
        tasks.observe("t", "k", solved, SIZE, 0)
    a, b = tasks.estimate("t", "k", 1.0, 0)
    assert a > 4 * b
    for number in range(20):
        tasks.observe(f"t{number}", "easy", SIZE, SIZE, 0)
    assert tasks.informative("new", "easy") < 0.1
    tasks.step = 40
    assert tasks.informative("new", "easy") == pytest.approx(tasks.informative("new", "unknown"), abs=0.03)
    assert tasks.informative("new", "unknown") > 0.7


@pytest.mark.parametrize("by", ["kind", "task"])
def test_a_tasks_own_groups_count_as_far_as_they_predict_its_next_ones(by: str) -> None:
    """Solve rates that are those of the kinds, or those of the tasks in a single kind."""
    rates = {f"t{number}": (0.02, 0.5, 0.98)[number % 3] for number in range(60)}
    kinds = {name: str(rates[name]) if by == "kind" else "k" for name in rates}
    tasks, dice = curriculum(), random.Random(0)
    for epoch in range(4):
        for name, rate in rates.items():
            tasks.observe(name, kinds[name], sum(dice.random() < rate for _ in range(SIZE)), SIZE, epoch)
    expected = [tasks.informative(name, kinds[name]) for name in rates]
    actual = [1 - rate**SIZE - (1 - rate) ** SIZE for rate in rates.values()]
    errors = [abs(one - other) for one, other in zip(expected, actual, strict=True)]
    assert tasks.own_weight == 0 if by == "kind" else tasks.own_weight > 0
    assert sum(errors) / len(errors) < 0.15


def test_a_task_that_is_always_solved_is_issued_as_often_as_the_floor_says() -> None:
    tasks = curriculum(floor=0.2)
    for _ in range(10):
        tasks.observe("t", "env/k", SIZE, SIZE, 0)
    issued = sum(tasks.accepts(index, task("t", "k")) for index in range(4000))
    assert issued == pytest.approx(800, abs=110)  # 4.3 standard deviations, and a fixed seed
    expected = tasks.informative("t", "env/k")
    found = tasks.metrics()
    assert (found["curriculum/skipped"], found["curriculum/informative"]) == (
        4000 - issued,
        pytest.approx(expected),
    )


def test_unknown_and_undecided_tasks_are_always_issued() -> None:
    tasks = curriculum(floor=0.01)
    assert all(tasks.accepts(index, task("new")) for index in range(200))
    tasks.observe("t", "env/k", SIZE // 2, SIZE, 0)
    assert all(tasks.accepts(index, task("t")) for index in range(200))
    tasks.observe("t", "env/k", SIZE, SIZE, 0)
    assert not all(tasks.accepts(index, task("t")) for index in range(200))


def test_a_uniform_curriculum_reads_no_task_and_skips_none() -> None:
    admission = Admission(
        Rules(groups_per_batch=1, group_size=2, min_group_size=2, max_staleness=0), lambda _: None
    )
    indices = [admission.next_ticket(lambda index: 1 / 0).index for _ in range(5)]  # type: ignore[arg-type, return-value]
    assert indices == list(range(5))
    assert admission.curriculum.metrics() == {}


@pytest.mark.parametrize(
    ("rewards", "solved"),
    [
        ((1, 1, 1), 3), ((0, 0, 0), 0), ((-1, -1), 0), ((1, 0, 0), 1), ((0.1, 0.2, 0.9), 1),
        ((-1, 1, 1), 2), ((0.3, 0.3 + 1e-12), 2), ((5, 6), 1),
    ],
)  # fmt: skip
def test_a_group_whose_rewards_differ_is_neither_all_solved_nor_all_failed(
    rewards: tuple[float, ...], solved: int
) -> None:
    assert with_rewards(*rewards).solved() == solved


@pytest.mark.parametrize(
    ("info", "kind"),
    [
        ({}, "env"), ({"kind": "a"}, "env/a"), ({"template": "b"}, "env/b"), ({"kind": 3}, "env"),
        ({"kind": "a", "template": "b"}, "env/a"),
    ],
)  # fmt: skip
def test_the_kind_of_a_task_is_named_by_its_info(info: dict[str, object], kind: str) -> None:
    assert Task("t", "env", [], info=info).kind == kind


def test_settings_reach_the_curriculum() -> None:
    def rules(*overrides: str) -> Rules:
        return Rules.of(load_settings(None, ["--model.path=m", *overrides]))

    assert rules().floor == 1
    chosen = rules("--trainer.curriculum.name=difficulty", "--trainer.curriculum.floor=0.3", "--run.seed=7")
    assert (chosen.floor, chosen.seed) == (0.3, 7)


# ------------------------------------------------------------------ resuming


class Killed(Exception):
    """Raised in place of a process that is killed right after a ledger entry."""


@dataclass
class Life:
    """A run whose groups' results depend on the index of their task alone; a batch is one group.

    It is killed after each of the numbers of entries in `kills`, and resumed from the newest marker.
    """

    finite: bool
    seed: int
    kills: list[int]
    rules: Rules = field(init=False)
    book: list[LedgerEntry] = field(default_factory=list)
    chosen: list[int] = field(default_factory=list)
    """The indices of the surviving lineage, in order."""
    step: int = 0
    marker: Checkpoint | None = None
    kept: int = 0
    """Number of `chosen` that the marker contains."""

    def __post_init__(self) -> None:
        self.rules = Rules(
            groups_per_batch=1, group_size=4, min_group_size=4, max_staleness=None, floor=0.1, seed=self.seed
        )

    def run(self, number: int) -> list[int]:
        self.resume()
        while len(self.chosen) < number:
            try:
                self.group()
            except Killed:
                self.resume()
        return self.chosen[:number]

    def enter(self, one: LedgerEntry) -> None:
        self.book.append({**one, "seq": len(self.book)})  # type: ignore[typeddict-item]
        if self.kills and len(self.book) >= self.kills[0]:
            self.kills.pop(0)
            raise Killed

    def task_at(self, index: int) -> Task:
        name = index % 30 if self.finite else index
        return task(f"t{name}", f"k{name % 3}")

    def result(self, index: int) -> int:
        """Number of solved episodes: kind 0 is easy, kind 1 hard, kind 2 between."""
        rate = (0.95, 0.1, 0.5)[index % 30 % 3 if self.finite else index % 3]
        dice = random.Random(f"{self.seed}/{index}")
        return sum(dice.random() < rate for _ in range(self.rules.group_size))

    def resume(self) -> None:
        while True:
            past = LedgerState()
            for one in self.book:
                past.apply(one)
            step = self.marker.step if self.marker else 0
            start = Start(Path(), step, past.highest_version + 1, past, self.marker)
            past.discard_after(start.position)
            self.step, self.chosen = step, self.chosen[: self.kept]
            try:
                self.core = restore_admission(start, self.enter, self.rules, {}).admission
            except Killed:
                continue
            return

    def group(self) -> None:
        core = self.core
        ticket = core.next_ticket(self.task_at)
        issued = self.task_at(ticket.index)
        group = core.start_group(ticket, issued.id, issued.kind)
        assert group is not None
        for slot in range(self.rules.group_size):
            core.end_attempt(core.start_attempt(group.id, slot), Outcome.COMPLETED)
        solved = self.result(ticket.index)
        core.lease(group.id, core.version, core.version, solved)
        if solved in (0, self.rules.group_size):
            core.filter_group(group.id)
            self.chosen.append(ticket.index)
            return
        selection = core.select_batch()
        assert selection is not None
        self.step += 1
        core.step(selection, self.step)
        self.chosen.append(ticket.index)
        core.mark_live(core.versions.reserve(self.step))
        progress = asdict(core.progress())
        self.marker = Checkpoint(Path(), self.step, {**progress, "ledger": len(self.book)})
        self.kept = len(self.chosen)


@settings(max_examples=60, deadline=None)
@given(st.booleans(), st.integers(0, 2**32), st.lists(st.integers(2, 600), max_size=8))
def test_a_run_that_is_killed_anywhere_issues_the_same_tasks(
    finite: bool, seed: int, kills: list[int]
) -> None:
    undisturbed = Life(finite, seed, []).run(60)
    assert undisturbed != list(range(60)), "some were skipped"
    assert Life(finite, seed, sorted(kills)).run(60) == undisturbed


def test_another_seed_skips_other_tasks() -> None:
    assert Life(True, 1, []).run(60) != Life(True, 2, []).run(60)

"""The record of tasks, `tidegate tasks`, lifted quarantines, and what the audit makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.trainer.learning_fixtures import make_trajectory, make_turn
from tidegate.cli import main
from tidegate.config import Settings
from tidegate.errors import TidegateError
from tidegate.settings import sections
from tidegate.trainer.admission.core import Admission
from tidegate.trainer.admission.rules import Rules
from tidegate.trainer.ledger.audit import audit_run
from tidegate.trainer.ledger.entries import LedgerEntry, entry
from tidegate.trainer.ledger.ledger import Ledger
from tidegate.trainer.ledger.state import read_ledger_state
from tidegate.trainer.ledger.tasks import TaskRecord, task_records
from tidegate.trainer.records.lift_requests import lift_requested, request_lift, requested_lifts
from tidegate.types import Group, Outcome, Task

RULES = Rules(
    groups_per_batch=1, group_size=2, min_group_size=2, max_staleness=1, max_attempts=2, max_infra_attempts=2
)
RAW = {
    "model": {"path": "model"},
    "trainer": {"groups_per_batch": 1, "group_size": 2, "max_staleness": 1, "max_attempts": 2},
}


async def durable() -> None:
    """Stands for the ledger's method."""


class Stage:
    """A run directory with the ledger of an admission."""

    def __init__(self, run_dir: Path) -> None:
        self.dir = run_dir
        (run_dir / "config.toml").write_text(sections.dump(Settings.model_validate(RAW)))
        self.core = Admission(RULES, self.record)
        self.record(
            entry("run", "started", epoch=1, step=0, version=0, position=None, rules=RULES.for_ledger())
        )

    def record(self, line: LedgerEntry) -> None:
        with Ledger(self.dir / "ledger.jsonl") as ledger:
            ledger.record(line)

    def group(self, task: str, *slots: list[Outcome]) -> str:
        group = self.core.start_group(self.core.cursor.next(), task, "hard")
        assert group is not None
        for number, outcomes in enumerate(slots):
            for outcome in outcomes:
                if group.id in self.core.groups:
                    self.core.end_attempt(
                        self.core.start_attempt(group.id, number), outcome, f"{task} why\nb"
                    )
        return group.id

    def filtered(self, task: str, solved: int) -> None:
        group = self.group(task, [Outcome.COMPLETED], [Outcome.COMPLETED])
        self.core.lease(group, 0, 0, solved)
        self.core.filter_group(group)

    def records(self) -> dict[str, TaskRecord]:
        return {one.task: one for one in task_records(read_ledger_state(self.dir / "ledger.jsonl"))}

    def listed(self, capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
        assert main(["tasks", str(self.dir), "--json", *words]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    """Tasks that were filtered, quarantined, given up without blame, and touched by an outage."""
    stage = Stage(tmp_path)
    stage.filtered("easy", 2)
    stage.filtered("hard", 0)
    stage.filtered("hard", 1)
    stage.group("bad", [Outcome.COMPLETED], [Outcome.AGENT_ERROR, Outcome.TIMEOUT])
    stage.group("unlucky", [Outcome.INFRA_ERROR, Outcome.CANCELLED])
    group = stage.core.start_group(stage.core.cursor.next(), "paused")
    assert group is not None
    attempt = stage.core.start_attempt(group.id, 0)
    stage.core.outage.set_down("no engine serves")
    stage.core.outage.set_down(None)
    stage.core.end_attempt(attempt, Outcome.TIMEOUT)
    return stage


def test_each_task_has_its_groups_and_failures_by_cause(stage: Stage) -> None:
    records = stage.records()
    assert next(iter(records)) == "bad", "quarantined tasks come first"
    easy, hard, bad = records["easy"], records["hard"], records["bad"]
    assert (easy.groups, easy.filtered_solved, easy.filtered_failed) == ({"filtered": 1}, 1, 0)
    assert (hard.groups, hard.filtered_solved, hard.filtered_failed) == ({"filtered": 2}, 0, 1)
    assert (bad.groups, bad.failures) == ({"failed": 1}, {"agent_error": 1, "timeout": 1})
    assert bad.quarantine is not None
    assert (bad.quarantine["outcome"], bad.kind) == ("timeout", "hard")
    assert records["unlucky"].failures == {"infra_error": 1, "worker_lost": 1}
    assert records["unlucky"].quarantine is None
    assert records["paused"].failures == {"timeout_in_outage": 1}
    assert records["paused"].groups == {"live": 1}
    assert audit_run(stage.dir).consistent


def test_the_command_lists_them(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    first, *others = stage.listed(capsys)
    assert first["task"] == "bad"
    assert (first["issued"], first["failed"], first["quarantined"]["why"]) == (1, 1, "bad why\nb")
    assert {one["task"]: one["quarantined"] for one in others} == dict.fromkeys(
        ["easy", "hard", "unlucky", "paused"]
    )
    assert [one["task"] for one in stage.listed(capsys, "--quarantined")] == ["bad"]
    assert main(["tasks", str(stage.dir)]) == 0
    text = capsys.readouterr().out
    assert "agent_error 1, timeout 1" in text
    assert ": timeout: bad why\n" in text


async def test_a_lift_is_requested_carried_out_once_and_entered(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tasks", str(stage.dir), "--lift", "bad"]) == 0
    assert "requested: the quarantine of 1 task is lifted" in capsys.readouterr().out
    assert stage.listed(capsys, "--quarantined")[0]["lift_requested"]
    main(["tasks", str(stage.dir)])
    assert "its lift is requested" in capsys.readouterr().out
    request_lift(stage.dir, ["bad", "easy"])
    assert await lift_requested(stage.dir, stage.core.failures.lift, durable) == ["bad"]
    assert await lift_requested(stage.dir, stage.core.failures.lift, durable) == []
    assert requested_lifts(stage.dir) == set()
    assert stage.listed(capsys, "--quarantined") == []
    stage.group("bad", [Outcome.COMPLETED])
    assert audit_run(stage.dir).consistent


async def test_a_lift_that_a_crash_interrupts_is_carried_out_once(stage: Stage) -> None:
    request_lift(stage.dir, ["bad"])

    def crash(task: str) -> bool:
        stage.core.failures.lift(task)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await lift_requested(stage.dir, crash, durable)
    assert await lift_requested(stage.dir, stage.core.failures.lift, durable) == []
    book = (stage.dir / "ledger.jsonl").read_text().splitlines()
    assert sum('"lifted"' in line for line in book) == 1


def test_all_quarantines_are_lifted(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.group("worse", [Outcome.REWARD_ERROR, Outcome.REWARD_ERROR])
    assert main(["tasks", str(stage.dir), "--lift", "--all"]) == 0
    assert requested_lifts(stage.dir) == {"bad", "worse"}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--lift"], "give the tasks"),
        (["--all"], "give the tasks"),
        (["--lift", "bad", "--all"], "give the tasks"),
        (["--lift", "easy"], "'easy' is not quarantined"),
        (["--lift", "bda"], "'bda' is no task of this run; did you mean 'bad'?"),
        (["--lift", "bad", "--json"], "leave them out"),
    ],
)
def test_what_cannot_be_lifted(
    stage: Stage, capsys: pytest.CaptureFixture[str], words: list[str], why: str
) -> None:
    assert main(["tasks", str(stage.dir), *words]) == 2
    assert why in capsys.readouterr().err
    assert requested_lifts(stage.dir) == set()


async def test_a_damaged_request_is_named(stage: Stage) -> None:
    (stage.dir / "lifts").mkdir()
    (stage.dir / "lifts" / "1.json").write_text("7")
    with pytest.raises(TidegateError, match=r"1\.json cannot be read .*; remove it"):
        await lift_requested(stage.dir, stage.core.failures.lift, durable)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (entry("group", "issued", id="g", task="bad", index=9, version=0), "task bad, which is quarantined"),
        (entry("run", "lifted", task="easy"), "task easy was lifted, but it was not quarantined"),
    ],
)
def test_the_audit_finds_what_cannot_be(stage: Stage, line: LedgerEntry, why: str) -> None:
    stage.record(line)
    assert any(why in finding for finding in audit_run(stage.dir).findings)


@pytest.mark.parametrize("details", [{"outcome": "timeout", "spared": True}, {"outcome": "infra_error"}])
def test_the_audit_knows_which_attempts_an_outage_touched(stage: Stage, details: dict[str, Any]) -> None:
    """A failure is spared without an outage, or charged beyond its budget."""
    group = stage.core.start_group(stage.core.cursor.next(), "other")
    assert group is not None
    for number in (1, 2, 3):
        name = f"{group.id}.0.{number}"
        stage.record(entry("attempt", "issued", id=name, group=group.id, slot=0, number=number))
        stage.record(entry("attempt", "ended", id=name, state="failed", **details))
    found = audit_run(stage.dir).findings
    why = "there was no outage" if "spared" in details else "failed 3 times; max_infra_attempts is 2"
    assert any(why in finding for finding in found), found


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
    members = [make_trajectory([make_turn(0, None, [1], [2])]) for _ in rewards]
    for trajectory, reward in zip(members, rewards, strict=True):
        trajectory.reward = reward
    assert Group("g", "t", members).solved() == solved


@pytest.mark.parametrize(
    ("info", "kind"),
    [
        ({}, "env"), ({"kind": "a"}, "env/a"), ({"template": "b"}, "env/b"), ({"kind": 3}, "env"),
        ({"kind": "a", "template": "b"}, "env/a"),
    ],
)  # fmt: skip
def test_the_kind_of_a_task_is_named_by_its_info(info: dict[str, object], kind: str) -> None:
    assert Task("t", "env", [], info=info).kind == kind

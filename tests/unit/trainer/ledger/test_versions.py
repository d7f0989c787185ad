"""The versions of a run by its ledger, and the audit of promotions and roll-backs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tidegate.config import ModelSettings, Settings
from tidegate.trainer.admission.core import Admission
from tidegate.trainer.admission.rules import Rules
from tidegate.trainer.ledger.audit_check import LedgerCheck
from tidegate.trainer.ledger.entries import LedgerEntry, entry
from tidegate.trainer.ledger.ledger import Ledger, read_ledger
from tidegate.trainer.ledger.state import read_ledger_state
from tidegate.trainer.ledger.versions import version_records

FIGURES = {"reward": 0.4, "live_reward": 0.8, "episodes": 30, "live_episodes": 60}


def states(path: Path) -> dict[int, str]:
    return {record.version: record.state for record in version_records(read_ledger(path))}


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[Path, Callable[[LedgerEntry], None], Admission]:
    path = tmp_path / "ledger.jsonl"

    def record(line: LedgerEntry) -> None:
        with Ledger(path) as ledger:
            ledger.record(line)

    rules = Rules(groups_per_batch=1, group_size=1, min_group_size=1, max_staleness=2)
    record(entry("run", "started", epoch=1, step=0, version=0, position=None))
    return path, record, Admission(rules, record)


def test_each_version_has_the_state_that_its_entries_give_it(recorded: Any) -> None:
    path, record, admission = recorded
    admission.versions.reserve(1, candidate=True)
    assert states(path) == {0: "live", 1: "in test"}
    admission.versions.promote(1, 1, "better", FIGURES)
    admission.mark_live(1)
    assert states(path) == {0: "superseded", 1: "live"}
    admission.versions.reserve(2, candidate=True)
    admission.roll_back(2, 1, 2, "worse", FIGURES)
    admission.versions.reserve(3, candidate=True)
    record(entry("run", "ended", step=3, version=1))
    assert states(path) == {0: "superseded", 1: "live", 2: "rolled back", 3: "not tested"}
    worse = version_records(read_ledger(path))[2]
    assert (worse.reward, worse.live_reward, worse.episodes, worse.why) == (0.4, 0.8, 30, "worse")


def test_a_roll_back_by_hand_gives_up_every_version_after_its_target(recorded: Any) -> None:
    path, _, admission = recorded
    for version in (1, 2, 3):
        admission.versions.reserve(version)
        admission.mark_live(version)
    admission.roll_back(3, 1, 3, "by hand")
    admission.versions.reserve(3)
    admission.mark_live(4)
    assert states(path) == {
        0: "superseded", 1: "superseded", 2: "rolled back", 3: "rolled back", 4: "live"
    }  # fmt: skip
    assert read_ledger_state(path).abandoned == {2, 3} == admission.versions.abandoned
    assert not admission.versions.admissible(1, 2)
    assert not admission.versions.admissible(2, 4)
    assert admission.versions.admissible(4, 4)


def test_the_first_version_of_an_earlier_start_from_the_same_checkpoint_is_not_abandoned(
    recorded: Any,
) -> None:
    """It has the weights with which the run continues, and feedback of a downtime is of its tokens."""
    path, record, admission = recorded
    admission.versions.reserve(1)
    position = len(path.read_text().splitlines())
    check = LedgerCheck(Settings(model=ModelSettings(path=path)))
    for epoch, first in ((2, 2), (3, 4)):
        record(entry("run", "started", epoch=epoch, step=1, version=first, position=position))
        record(entry("run", "publishing", version=first + 1, step=2))
    past = read_ledger_state(path)
    past.discard_after(position)
    record(entry("run", "started", epoch=4, step=1, version=6, position=position))
    for line in read_ledger(path):
        check.read(line)
    assert past.abandoned == set(check.abandoned) == read_ledger_state(path).abandoned == {3, 5}
    by_state = states(path)
    assert [version for version in by_state if by_state[version] == "abandoned"] == [3, 5]
    past.discard_after(0)
    assert past.abandoned == {1, 2, 3, 4, 5}, "a start from the base model has other weights"


def test_a_resume_from_before_a_promotion_abandons_it(recorded: Any) -> None:
    path, record, admission = recorded
    position = len(path.read_text().splitlines())
    admission.versions.reserve(1, candidate=True)
    admission.versions.promote(1, 1, "better", FIGURES)
    record(entry("run", "started", epoch=2, step=0, version=2, position=position))
    assert states(path) == {0: "superseded", 1: "abandoned", 2: "live"}
    assert read_ledger_state(path).abandoned == {1}


def test_groups_may_start_while_a_candidate_is_tested_and_not_while_it_goes_live(recorded: Any) -> None:
    _, _, admission = recorded
    admission.versions.reserve(1, candidate=True)
    assert admission.blocked_by() is None
    admission.versions.promote(1, 1, "better", FIGURES)
    assert "being published" in (admission.blocked_by() or "")
    admission.mark_live(1)
    admission.versions.reserve(2, candidate=True)
    admission.roll_back(2, 1, 2, "worse", FIGURES)
    assert admission.blocked_by() is None

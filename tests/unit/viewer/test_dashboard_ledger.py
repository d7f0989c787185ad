"""Groups as the dashboard reads them from the ledger."""

from __future__ import annotations

from typing import Any

from tidegate.trainer.ledger.state import LedgerState
from tidegate.viewer.ledger import apply_entries, group_to_wire, quarantined

GROUP = {"kind": "group", "id": "g"}


def applied(state: LedgerState, *entries: dict[str, Any]) -> LedgerState:
    apply_entries(state, ({"seq": seq, **entry} for seq, entry in enumerate(entries)))
    return state


def shown(state: LedgerState) -> tuple[int | None, ...]:
    group = group_to_wire(state, "g")
    assert group is not None
    return group["step"], group["staleness"], group["oldest"]


def test_a_task_whose_quarantine_was_lifted_is_not_listed() -> None:
    run = {"kind": "run", "event": "quarantined", "outcome": "timeout"}
    lifted = {"kind": "run", "event": "lifted", "task": "a"}
    state = applied(LedgerState(), {**run, "task": "a"}, {**run, "task": "b"}, lifted)
    assert [task["task"] for task in quarantined(state)] == ["b"]


def test_a_rolled_back_step_is_not_shown_for_its_group() -> None:
    ending = {**GROUP, "event": "ended", "state": "stepped"}
    state = applied(
        LedgerState(),
        {"kind": "run", "event": "started", "version": 0, "position": None},
        {**GROUP, "event": "issued", "task": "t", "version": 4},
        {**ending, "step": 5, "staleness": 1, "oldest": 4},
        {"kind": "run", "event": "publishing", "version": 5},
    )
    assert shown(state) == (5, 1, 4)
    started = {"kind": "run", "event": "started", "version": 6, "position": 1}
    applied(state, started, {**GROUP, "event": "put_back"})
    assert state.publishes[-1]["version"] == 6
    assert shown(state) == (None, None, None)
    applied(state, {**ending, "step": 6, "staleness": 2, "oldest": 4})
    assert shown(state) == (6, 2, 4)


def test_an_invalid_entry_is_skipped() -> None:
    issued = {**GROUP, "event": "issued", "task": "t"}
    state = applied(
        LedgerState(),
        issued,
        {**GROUP, "event": "ended", "state": "?"},
        {**GROUP, "id": "?", "event": "ended"},
    )
    assert state.live() == ["g"]

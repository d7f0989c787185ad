"""Single groups as the dashboard reads them from the ledger."""

from __future__ import annotations

from tidegate.viewer.dashboard.ledger_groups import LedgerGroups


def test_a_task_whose_quarantine_was_lifted_is_not_listed() -> None:
    book = LedgerGroups()
    for task in ("a", "b"):
        book.enter({"kind": "run", "event": "quarantined", "task": task, "outcome": "timeout"})
    book.enter({"kind": "run", "event": "lifted", "task": "a"})
    assert [one.task for one in book.quarantined] == ["b"]


def test_a_rolled_back_step_is_not_shown_for_its_group() -> None:
    book = LedgerGroups()
    ending = {"kind": "group", "event": "ended", "id": "g", "state": "stepped"}
    book.enter({"kind": "run", "event": "started", "version": 0, "position": None})
    book.enter({"kind": "group", "event": "issued", "id": "g", "task": "t", "version": 4})
    book.enter({**ending, "step": 5, "staleness": 1, "oldest": 4})
    book.enter({"kind": "run", "event": "publishing", "version": 5})
    assert (book.groups["g"].step, book.groups["g"].staleness, book.groups["g"].oldest) == (5, 1, 4)
    book.enter({"kind": "run", "event": "started", "version": 6, "position": 1})
    book.enter({"kind": "group", "event": "put_back", "id": "g"})
    assert book.version == 6
    assert (book.groups["g"].step, book.groups["g"].staleness, book.groups["g"].oldest) == (None, None, None)
    book.enter({**ending, "step": 6, "staleness": 2, "oldest": 4})
    assert (book.groups["g"].step, book.groups["g"].staleness, book.groups["g"].oldest) == (6, 2, 4)

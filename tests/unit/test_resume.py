"""What a ledger tells a run that goes on: what is lost, what stays trained, which versions are spent."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidegate.config import Settings, load_settings
from tidegate.errors import ConfigError
from tidegate.trainer.entries import Entry, State, entry
from tidegate.trainer.ledger import Ledger, read_ledger
from tidegate.trainer.resume import Past, bury, read_past
from tidegate.trainer.start import Start, rules_of


def written(path: Path, entries: list[Entry]) -> Past:
    with Ledger(path) as ledger:
        for one in entries:
            ledger.book(one)
    return read_past(path)


def stepped(name: str, step: int) -> list[Entry]:
    return [
        entry("group", "issued", id=name, task=name, index=0, version=0, replaces=None),
        entry("group", "ended", id=name, state="stepped", step=step, version=0, oldest=0, staleness=0),
    ]


def started(epoch: int, position: int | None = None, version: int = 0) -> Entry:
    return entry("run", "started", epoch=epoch, step=0, version=version, position=position)


def test_an_absent_ledger_is_an_empty_past(tmp_path: Path) -> None:
    past = read_past(tmp_path / "none.jsonl")
    assert (past.epoch, past.highest_version, past.live()) == (0, -1, ([], []))


def test_only_what_lies_before_the_marker_is_trained(tmp_path: Path) -> None:
    past = written(tmp_path / "l", [started(1), *stepped("a", 1), *stepped("b", 2)])
    assert past.counts(past.groups, 3) == {State.TRAINED: 1, State.STEPPED: 1}
    assert past.counts(past.groups, 0) == {State.STEPPED: 2}


def test_an_abandoned_lineage_never_becomes_trained_by_a_later_marker(tmp_path: Path) -> None:
    """`b` lay behind the marker at 3 that epoch 2 went on from; a marker after `c` does not bring it back."""
    entries = [
        started(1),
        *stepped("a", 1),
        *stepped("b", 2),
        started(2, position=3, version=5),
        *stepped("c", 2),
    ]
    past = written(tmp_path / "l", entries)
    assert past.counts(past.groups, len(entries)) == {State.TRAINED: 2, State.STEPPED: 1}
    past.abandon(3)
    assert past.counts(past.groups, len(entries)) == {State.TRAINED: 1, State.STEPPED: 2}


def test_epoch_and_highest_version_are_found_wherever_they_stand(tmp_path: Path) -> None:
    entries = [
        started(1),
        entry("run", "publishing", version=7, step=1),
        started(2, 0, version=8),
        started(3, 0, 9),
    ]
    past = written(tmp_path / "l", entries)
    assert (past.epoch, past.highest_version) == (3, 9)


def test_what_was_live_is_buried_once(tmp_path: Path) -> None:
    path = tmp_path / "l"
    live = [
        entry("group", "issued", id="g", task="t", index=0, version=0, replaces=None),
        entry("attempt", "issued", id="g.0.1", group="g", slot=0, number=1),
    ]
    past = written(path, [started(1), *live])
    with Ledger(path) as ledger:
        assert bury(past, ledger.book) == 1
        assert bury(past, ledger.book) == 0
    ends = [(one["id"], one["state"]) for one in read_ledger(path) if one["event"] == "ended"]
    assert ends == [("g.0.1", "cancelled"), ("g", "cancelled")], "attempts end before their group"


def settings(tmp_path: Path) -> Settings:
    return load_settings(None, ["--model.path=model", f"--run.dir={tmp_path}", "--run.name=r"])


def test_a_run_that_never_committed_begins_again_under_new_versions(tmp_path: Path) -> None:
    run_dir = tmp_path / "r"
    run_dir.mkdir()
    written(run_dir / "ledger.jsonl", [started(1), entry("run", "publishing", version=3, step=3)])
    start = Start.of(settings(tmp_path), resume=True)
    assert (start.step, start.version, start.checkpoint) == (0, 4, None)
    with Ledger(run_dir / "ledger.jsonl") as ledger:
        admission, lost = start.open_book(ledger, rules_of(settings(tmp_path)))
        assert (admission.epoch, admission.version, lost) == (2, 4, 0)
        assert admission.publishing(1) == 5


def test_a_taken_directory_and_a_missing_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run to resume"):
        Start.of(settings(tmp_path), resume=True)
    (tmp_path / "r").mkdir()
    written(tmp_path / "r" / "ledger.jsonl", [started(1)])
    with pytest.raises(ConfigError, match="--resume"):
        Start.of(settings(tmp_path), resume=False)

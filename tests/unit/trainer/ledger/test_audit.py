"""The audit of a ledger on disk finds every manipulation."""

from __future__ import annotations

import asyncio
import json
import resource
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import eventually
from tidegate.config import Settings
from tidegate.errors import LedgerError
from tidegate.settings import sections
from tidegate.trainer.admission.core import Admission
from tidegate.trainer.admission.rules import Rules
from tidegate.trainer.ledger import audit as audits
from tidegate.trainer.ledger.audit import audit_run
from tidegate.trainer.ledger.audit_check import summary, table
from tidegate.trainer.ledger.entries import LedgerEntry, entry
from tidegate.trainer.ledger.ledger import Ledger, read_ledger
from tidegate.types import Outcome

RAW = {
    "model": {"path": "model"},
    "trainer": {"groups_per_batch": 2, "group_size": 2, "max_staleness": 1, "max_attempts": 2, "steps": 3},
}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A small run's files, written by the real admission core and ledger: three steps, one checkpoint."""
    (tmp_path / "config.toml").write_text(sections.dump(Settings.model_validate(RAW)))
    (tmp_path / "trajectories").mkdir()
    with Ledger(tmp_path / "ledger.jsonl") as ledger, open(tmp_path / "metrics.jsonl", "w") as metrics:
        rules = Rules(groups_per_batch=2, group_size=2, min_group_size=2, max_staleness=1, max_attempts=2)
        core = Admission(rules, ledger.record)
        started = entry("run", "started", epoch=1, step=0, version=0, position=None, rules=rules.for_ledger())
        ledger.record(started)
        metrics.write('{"step": 0}\n')
        for step in range(1, 4):
            _step(tmp_path, core, step)
            metrics.write(json.dumps({"step": step}) + "\n")
            if step == 2:
                _commit(tmp_path, step, ledger.position)
        ledger.record(entry("run", "ended", step=3, version=core.version))
    return tmp_path


def _step(run_dir: Path, core: Admission, step: int) -> None:
    found = []
    for number in range(2):
        ticket = core.cursor.next()
        group = core.start_group(ticket, f"task{ticket.index}")
        assert group is not None
        if number == 0:
            core.end_attempt(core.start_attempt(group.id, 0), Outcome.TIMEOUT, "slow")
        for slot in range(2):
            core.end_attempt(core.start_attempt(group.id, slot), Outcome.COMPLETED)
            turns = [{"delivered": True, "version_spans": [[core.version, 0, 3]], "output_ids": [1, 2, 3]}]
            found.append({"state": "stepped", "group_id": group.id, "turns": turns})
        core.lease(group.id, core.version)
    selection = core.select_batch()
    assert selection is not None
    (run_dir / "trajectories" / f"step_{step:06d}.jsonl").write_text(
        "".join(json.dumps(one) + "\n" for one in found)
    )
    core.step(selection, step)
    core.mark_live(core.versions.reserve(step))


def test_an_honest_run_holds(run_dir: Path) -> None:
    audit = audit_run(run_dir)
    assert audit.consistent, table(audit)
    assert dict(audit.groups) == {"trained": 4, "stepped": 2}, "what lies behind the marker is not trained"
    assert dict(audit.attempts) == {"trained": 8, "stepped": 4, "failed": 3}
    assert (audit.steps, audit.versions, audit.trained_tokens) == (3, 3, 36)
    assert table(audit).endswith("the ledger is consistent")


def test_tokens_that_were_trained_on_before_a_roll_back_are_no_finding(run_dir: Path) -> None:
    path = run_dir / "ledger.jsonl"
    book = lines(path)
    rolled_back = {"kind": "run", "event": "rolled_back", "version": 3, "to": 0, "step": 3, "why": ""}
    book.insert(len(book) - 1, rolled_back)
    _renumber(book)
    path.write_text("".join(json.dumps(one) + "\n" for one in book))
    assert audit_run(run_dir).consistent


def _index(book: list[dict[str, Any]], **wanted: Any) -> int:
    return next(
        n for n, one in enumerate(book) if all(one.get(key) == value for key, value in wanted.items())
    )


def _drop_line(book: list[dict[str, Any]]) -> None:
    del book[5]


def _end_twice(book: list[dict[str, Any]]) -> None:
    book.append({**book[_index(book, kind="group", event="ended")], "seq": len(book)})


def _issue_twice(book: list[dict[str, Any]]) -> None:
    book.insert(0, {**book[_index(book, kind="group", event="issued")]})
    _renumber(book)


def _never_issued(book: list[dict[str, Any]]) -> None:
    del book[_index(book, kind="attempt", event="issued")]
    _renumber(book)


def _too_stale(book: list[dict[str, Any]]) -> None:
    one = book[_index(book, kind="group", state="stepped", step=3)]
    one["oldest"], one["staleness"] = 0, 2


def _lying_staleness(book: list[dict[str, Any]]) -> None:
    book[_index(book, kind="group", state="stepped", step=3)]["staleness"] = 1


def _version_again(book: list[dict[str, Any]]) -> None:
    found = [one for one in book if one["event"] == "publishing"]
    found[-1]["version"] = found[-2]["version"]


def _stale_within_the_bound(book: list[dict[str, Any]]) -> None:
    one = book[_index(book, kind="group", state="stepped", step=3)]
    one["state"] = "stale"


def _half_a_batch(book: list[dict[str, Any]]) -> None:
    book[_index(book, kind="group", state="stepped", step=3)]["step"] = 2


def _live_at_the_end(book: list[dict[str, Any]]) -> None:
    del book[_index(book, kind="group", state="stepped", step=3)]
    _renumber(book)


def _too_many_attempts(book: list[dict[str, Any]]) -> None:
    for one in book:
        if one["kind"] == "attempt" and one["event"] == "ended":
            one["state"], one["outcome"] = "failed", "timeout"
    group = book[_index(book, kind="group", event="issued")]["id"]
    for one in book:
        if one["kind"] == "attempt" and one["event"] == "issued" and one["group"] == group:
            one["slot"] = 0


def _replaces_a_trained_one(book: list[dict[str, Any]]) -> None:
    first = book[_index(book, kind="group", event="issued")]["id"]
    book[_index(book, kind="group", event="issued", index=5)]["replaces"] = first


def _promoted_without_a_test(book: list[dict[str, Any]]) -> None:
    book.append({"kind": "run", "event": "promoted", "version": 3, "step": 3, "why": "", "seq": len(book)})


def _trained_after_its_roll_back(book: list[dict[str, Any]]) -> None:
    at = _index(book, kind="group", event="issued", version=2)
    book.insert(at, {"kind": "run", "event": "rolled_back", "version": 2, "to": 1, "step": 2, "why": ""})
    _renumber(book)


def _renumber(book: list[dict[str, Any]]) -> None:
    for number, one in enumerate(book):
        one["seq"] = number


@pytest.mark.parametrize(
    ("tamper", "words"),
    [
        (_drop_line, "is missing"),
        (_end_twice, "ended twice"),
        (_issue_twice, "issued twice"),
        (_never_issued, "never issued"),
        (_too_stale, "over the bound"),
        (_lying_staleness, "is not"),
        (_stale_within_the_bound, "ended stale at staleness 0, within the bound 1"),
        (_version_again, "was published after"),
        (_promoted_without_a_test, "is not a candidate"),
        (_trained_after_its_roll_back, "trained on tokens of version 2, which is abandoned"),
        (_half_a_batch, "took 3 groups"),
        (_live_at_the_end, "still live"),
        (_too_many_attempts, "max_attempts is 2"),
        (_replaces_a_trained_one, "did not end stale"),
    ],
)
def test_every_tampering_is_found(
    run_dir: Path, tamper: Callable[[list[dict[str, Any]]], None], words: str
) -> None:
    path = run_dir / "ledger.jsonl"
    book = lines(path)
    tamper(book)
    path.write_text("".join(json.dumps(one) + "\n" for one in book))
    audit = audit_run(run_dir)
    assert any(words in finding for finding in audit.findings), audit.findings


def _resume(run_dir: Path, *ends: str) -> None:
    """Go on from the marker of step 2: the groups of step 3 are put back, and end as `ends` say."""
    book = lines(run_dir / "ledger.jsonl")
    position = json.loads((run_dir / "checkpoints" / "step_2" / "COMMITTED").read_text())["ledger"]
    groups = [one["id"] for one in book if one["kind"] == "group" and one.get("step") == 3]
    (run_dir / "trajectories" / "step_000003.jsonl").unlink()
    metrics = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_text("".join(metrics[:-1]))
    with Ledger(run_dir / "ledger.jsonl") as ledger:
        ledger.record(entry("run", "started", epoch=2, step=2, version=4, position=position))
        for group in groups:
            ledger.record(entry("group", "put_back", id=group))
        for group, end in zip(groups, ends, strict=True):
            for slot in (0, 1):
                name = next(
                    one["id"] for one in book if one.get("group") == group and one["slot"] == slot
                    and any(e.get("id") == one["id"] and e.get("state") == "stepped" for e in book)
                )  # fmt: skip
                ledger.record(entry("attempt", "ended", id=name, state=end, outcome="completed"))
            details = {"step": 3, "version": 4, "oldest": 3, "staleness": 1} if end == "stepped" else {}
            ledger.record(entry("group", "ended", id=group, state=end, **details))
        ledger.record(entry("run", "ended", step=2, version=4))


def test_a_restored_group_ends_once_more(run_dir: Path) -> None:
    _resume(run_dir, "stale", "stale")
    audit = audit_run(run_dir)
    assert audit.consistent, table(audit)
    assert dict(audit.groups) == {"trained": 4, "stale": 2}
    assert dict(audit.attempts) == {"trained": 8, "stale": 4, "failed": 3}
    assert summary(audit) == "audit: 6 groups = 4 trained + 2 stale; the ledger is consistent"


def _put_back_a_trained_one(book: list[dict[str, Any]]) -> None:
    first = book[_index(book, kind="group", event="issued")]["id"]
    book[_index(book, event="put_back")]["id"] = first


def _never_put_back(book: list[dict[str, Any]]) -> None:
    start = _index(book, event="put_back")
    del book[start:-1]
    _renumber(book)


def _trained_in_both_lineages(book: list[dict[str, Any]]) -> None:
    del book[_index(book, event="put_back")]
    _renumber(book)


def _trained_on_abandoned_tokens(book: list[dict[str, Any]]) -> None:
    for one in book[_index(book, event="put_back") :]:
        if one["event"] == "ended" and one["kind"] == "group":
            one |= {"state": "stepped", "step": 3, "version": 4, "oldest": 3, "staleness": 1}


@pytest.mark.parametrize(
    ("tamper", "words"),
    [
        (_put_back_a_trained_one, "no step on it was discarded"),
        (_never_put_back, "never restored"),
        (_trained_in_both_lineages, "ended twice"),
        (_trained_on_abandoned_tokens, "version 3, which is abandoned"),
    ],
)
def test_every_tampering_with_a_resume_is_found(
    run_dir: Path, tamper: Callable[[list[dict[str, Any]]], None], words: str
) -> None:
    _resume(run_dir, "stale", "stale")
    test_every_tampering_is_found(run_dir, tamper, words)


def test_a_step_that_was_written_down_and_not_entered_yet_is_no_finding(run_dir: Path) -> None:
    """The process died between the step's file and its entries."""
    path = run_dir / "ledger.jsonl"
    book = lines(path)
    del book[_index(book, kind="group", state="stepped", step=3) :]
    path.write_text("".join(json.dumps(one) + "\n" for one in book))
    (run_dir / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n')
    assert audit_run(run_dir).consistent


def test_a_run_that_was_resumed_with_other_settings_is_held_against_those_of_each_part(
    run_dir: Path,
) -> None:
    """`config.toml` has the newest alone."""
    other = {"groups_per_batch": 3, "group_size": 3, "max_staleness": 0, "max_attempts": 1}
    (run_dir / "config.toml").write_text(
        sections.dump(Settings.model_validate({**RAW, "trainer": {**RAW["trainer"], **other}}))
    )
    path = run_dir / "ledger.jsonl"
    book = lines(path)
    one = book[_index(book, kind="group", state="stepped", step=3)]
    one["oldest"], one["staleness"] = one["version"] - 1, 1
    trained = run_dir / "trajectories" / "step_000003.jsonl"
    trained.write_text(trained.read_text().replace("[[2, 0, 3]]", "[[1, 0, 3]]", 1))
    path.write_text("".join(json.dumps(one) + "\n" for one in book))
    audit = audit_run(run_dir)
    assert audit.consistent, table(audit)
    rules = {"groups_per_batch": 2, "group_size": 2, "min_group_size": 2, "max_staleness": 0}
    book[0]["rules"] = {**rules, "max_attempts": 2}
    path.write_text("".join(json.dumps(one) + "\n" for one in book))
    assert any("over the bound 0" in finding for finding in audit_run(run_dir).findings)


def test_keys_and_values_of_older_weights_count_as_in_the_ledger(run_dir: Path) -> None:
    path = run_dir / "ledger.jsonl"
    book = lines(path)
    one = book[_index(book, kind="group", state="stepped", step=3)]
    one["oldest"], one["staleness"] = one["version"] - 1, 1
    path.write_text("".join(json.dumps(one) + "\n" for one in book))
    assert any("but the ledger has 1" in finding for finding in audit_run(run_dir).findings)
    trained = run_dir / "trajectories" / "step_000003.jsonl"
    first, _, rest = trained.read_text().partition("\n")
    episode = json.loads(first)
    assert episode["group_id"] == one["id"]
    episode["turns"][0]["kv_version"] = 1
    trained.write_text(json.dumps(episode) + "\n" + rest)
    audit = audit_run(run_dir)
    assert audit.consistent, table(audit)


def _cut_step(run_dir: Path) -> None:
    path = run_dir / "trajectories" / "step_000002.jsonl"
    path.write_bytes(path.read_bytes()[:-10])


def _lost_line(run_dir: Path) -> None:
    path = run_dir / "trajectories" / "step_000002.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def _lost_step(run_dir: Path) -> None:
    (run_dir / "trajectories" / "step_000002.jsonl").unlink()


def _damaged_metrics(run_dir: Path) -> None:
    path = run_dir / "metrics.jsonl"
    path.write_text(path.read_text().replace('{"step": 2}', '{"step'))


def _damaged_marker(run_dir: Path) -> None:
    (run_dir / "checkpoints" / "step_2" / "COMMITTED").write_text("")


def _committed_early(run_dir: Path) -> None:
    """A checkpoint with a step that the ledger did not have at its position."""
    _move_checkpoint(run_dir, 3)


def _committed_unrecorded(run_dir: Path) -> None:
    _move_checkpoint(run_dir, 7)


def _committed_under_another_name(run_dir: Path) -> None:
    checkpoints = run_dir / "checkpoints"
    (checkpoints / "step_2").rename(checkpoints / "step_1")


def _committed_discarded(run_dir: Path) -> None:
    """A checkpoint with a step that a resume had discarded, and that was not taken again."""
    with Ledger(run_dir / "ledger.jsonl") as ledger:
        position = json.loads((run_dir / "checkpoints" / "step_2" / "COMMITTED").read_text())["ledger"]
        ledger.record(entry("run", "started", epoch=2, step=2, version=4, position=position))
        _commit(run_dir, 3, ledger.position)


def _committed_before_a_resume_from_an_earlier_one(run_dir: Path) -> None:
    """A checkpoint that was set aside during a resume and brought back."""
    with Ledger(run_dir / "ledger.jsonl") as ledger:
        _commit(run_dir, 3, ledger.position)
        position = json.loads((run_dir / "checkpoints" / "step_2" / "COMMITTED").read_text())["ledger"]
        ledger.record(entry("run", "started", epoch=2, step=2, version=4, position=position))


def _move_checkpoint(run_dir: Path, step: int) -> None:
    marker = run_dir / "checkpoints" / "step_2" / "COMMITTED"
    _commit(run_dir, step, json.loads(marker.read_text())["ledger"])
    marker.unlink()


def _commit(run_dir: Path, step: int, position: int) -> None:
    marker = run_dir / "checkpoints" / f"step_{step}" / "COMMITTED"
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.write_text(json.dumps({"step": step, "ledger": position}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_committed_early, "checkpoint step_3 was committed at entry"),
        (_committed_unrecorded, "the ledger has no step 7 before it"),
        (_committed_discarded, "the ledger has no step 3 before it"),
        (_committed_before_a_resume_from_an_earlier_one, "the ledger has no step 3 before it"),
        (_committed_under_another_name, "the marker of checkpoint step_1 is of step 2"),
        (_cut_step, "step_000002.jsonl, line 4 is damaged"),
        (_lost_line, "with 2 attempts, and step_000002.jsonl has 1 of them"),
        (_lost_step, "with 2 attempts, and step_000002.jsonl has 0 of them"),
        (_damaged_metrics, "metrics.jsonl, line 3 is damaged"),
        (_damaged_marker, "COMMITTED cannot be read"),
    ],
)
def test_damaged_and_missing_files_are_findings(
    run_dir: Path, damage: Callable[[Path], None], words: str
) -> None:
    damage(run_dir)
    assert any(words in finding for finding in audit_run(run_dir).findings), audit_run(run_dir).findings


def test_the_files_of_a_killed_run_have_no_finding(run_dir: Path) -> None:
    """A torn last line of the metrics, a directory that is no checkpoint, and a step that a start which died
    had set aside before it entered that."""
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write('{"step": 4')
    (run_dir / "checkpoints" / "step_old").mkdir()
    (run_dir / "checkpoints" / "step_old" / "COMMITTED").write_text("")
    aside = run_dir / "trajectories" / "taken_back"
    aside.mkdir()
    (run_dir / "trajectories" / "step_000003.jsonl").rename(aside / "2_step_000003.jsonl")
    audit = audit_run(run_dir)
    assert audit.consistent, table(audit)


def test_the_step_of_a_checkpoint_that_was_taken_again_after_a_resume_is_no_finding(run_dir: Path) -> None:
    """The checkpoints before and after the resume, the first with the marker of a start that failed."""
    path = run_dir / "ledger.jsonl"
    before = lines(path)
    position = json.loads((run_dir / "checkpoints" / "step_2" / "COMMITTED").read_text())["ledger"]
    again = [line for line in before[position:] if line["kind"] != "run"]
    with Ledger(path) as ledger:
        ledger.record(entry("run", "started", epoch=2, step=2, version=4, position=position))
        _commit(run_dir, 2, ledger.position)
        assert not [one for one in audit_run(run_dir).findings if "checkpoint" in one]
        for line in again:
            renamed = {key: f"{line[key]}b" for key in ("id", "group") if key in line}
            ledger.record({**line, **renamed})  # type: ignore[typeddict-item]
        _commit(run_dir, 3, ledger.position)
    assert not [one for one in audit_run(run_dir).findings if "checkpoint" in one]


@pytest.mark.parametrize("failed", [False, True])
def test_a_kill_among_the_entries_of_a_step_is_no_finding(run_dir: Path, failed: bool) -> None:
    """Nor if a start that failed before its own entry follows."""
    path = run_dir / "ledger.jsonl"
    book = lines(path)
    first = _index(book, kind="group", event="ended", step=3)
    (run_dir / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(3)))
    for size in range(first - 1, first + 3):
        kept = book[:size]
        if failed:
            kept.append({"seq": size, "kind": "run", "event": "ended", "epoch": 2, "step": 2, "version": 3})
        path.write_text("".join(json.dumps(one) + "\n" for one in kept))
        audit = audit_run(run_dir)
        assert audit.consistent, table(audit)


def test_a_step_that_lacks_a_group_is_found_after_later_entries(run_dir: Path) -> None:
    path = run_dir / "ledger.jsonl"
    book = lines(path)
    first = _index(book, kind="group", event="ended", step=3)
    later = {"seq": first + 1, "kind": "run", "event": "publishing", "version": 9, "step": 3}
    path.write_text("".join(json.dumps(one) + "\n" for one in [*book[: first + 1], later]))
    assert "step 3 took 1 groups, not 2" in audit_run(run_dir).findings


def test_what_the_trainer_writes_during_an_audit_is_no_finding(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is taken and committed once the audit has read the ledger."""
    monkeypatch.setattr(audits, "read_ledger", _then(run_dir))
    audit = audit_run(run_dir)
    assert audit.consistent, table(audit)
    assert (audit.steps, audit.trained_tokens) == (3, 36), "those of the ledger"
    assert (run_dir / "checkpoints" / "step_4").exists()


def _then(run_dir: Path) -> Callable[[Path], Iterator[LedgerEntry]]:
    def read(path: Path) -> Iterator[LedgerEntry]:
        position = len(entries := list(read_ledger(path)))
        yield from entries
        turns = [{"delivered": True, "version_spans": [[3, 0, 3]], "output_ids": [1, 2, 3]}]
        episode = {"state": "stepped", "group_id": "issued since", "turns": turns}
        (run_dir / "trajectories" / "step_000004.jsonl").write_text(json.dumps(episode) + "\n")
        with open(run_dir / "metrics.jsonl", "a") as file:
            file.write('{"step": 4}\n')
        _commit(run_dir, 4, position + 9)

    return read


def test_a_group_that_is_erased_during_an_audit_is_no_finding(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the audit has read the ledger, the trainer records the erasure and rewrites the step's file."""
    path = run_dir / "trajectories" / "step_000003.jsonl"
    group = lines(path)[0]["group_id"]

    def read(ledger_file: Path) -> Iterator[LedgerEntry]:
        yield from list(read_ledger(ledger_file))
        if group in path.read_text():
            with Ledger(ledger_file) as ledger:
                ledger.record(entry("run", "erased", group=group))
            path.write_text(
                "".join(json.dumps(one) + "\n" for one in lines(path) if one["group_id"] != group)
            )

    monkeypatch.setattr(audits, "read_ledger", read)
    audit = audit_run(run_dir)
    assert audit.consistent, table(audit)
    assert group not in path.read_text()


def test_a_file_that_is_lost_in_a_step_taken_again_is_found(run_dir: Path) -> None:
    """An earlier resume had set a file of the same step aside, and recorded that."""
    aside = run_dir / "trajectories" / "taken_back"
    aside.mkdir()
    (run_dir / "trajectories" / "step_000003.jsonl").rename(aside / "1_step_000003.jsonl")
    assert any("step_000003.jsonl has 0 of them" in finding for finding in audit_run(run_dir).findings)


def test_a_checkpoint_that_is_removed_during_an_audit_is_no_finding(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _commit(run_dir, 1, 12)
    read_text = Path.read_text

    def read(path: Path, *arguments: Any, **options: Any) -> str:
        if path.parent.name == "step_1":
            path.unlink(missing_ok=True)
        return read_text(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", read)
    audit = audit_run(run_dir)
    assert audit.consistent, table(audit)
    assert not (run_dir / "checkpoints" / "step_1" / "COMMITTED").exists()


def test_tokens_that_contradict_the_ledger_are_found(run_dir: Path) -> None:
    path = run_dir / "trajectories" / "step_000003.jsonl"
    path.write_text(path.read_text().replace("[[2, 0, 3]]", "[[1, 0, 3]]", 1))
    assert any("has tokens of version 1" in finding for finding in audit_run(run_dir).findings)


def test_older_tokens_of_an_opponent_that_is_not_trained_are_no_finding(run_dir: Path) -> None:
    path = run_dir / "trajectories" / "step_000003.jsonl"
    episodes = lines(path)
    turns = episodes[0]["turns"]
    turns.append({**turns[0], "version_spans": [[1, 0, 3]], "exempt": "policy 'opponent', which is frozen"})
    path.write_text("".join(json.dumps(one) + "\n" for one in episodes))
    audit = audit_run(run_dir)
    assert audit.consistent, table(audit)


def test_metrics_of_a_step_that_never_was_are_found(run_dir: Path) -> None:
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write('{"step": 9}\n')
    assert any("step 9" in finding for finding in audit_run(run_dir).findings)


def test_the_file_of_a_step_that_is_not_taken_may_be_appended_to(run_dir: Path) -> None:
    path = run_dir / "trajectories" / "step_000004.jsonl"
    path.write_text('{"state": "filtered", "group_id": "x"}\n{"state": "filt')
    assert audit_run(run_dir).findings == []


def test_a_torn_last_line_is_dropped_and_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        ledger.record(entry("group", "issued", id="a"))
    with open(path, "ab") as file:
        file.write(b'{"seq": 1, "kind": "gro')
    with Ledger(path) as ledger:
        assert ledger.position == 1
        ledger.record(entry("group", "issued", id="b"))
    assert [(one["seq"], one["id"]) for one in read_ledger(path)] == [(0, "a"), (1, "b")]


def test_a_damaged_line_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(b'{"seq": 0}\n{broken\n{"seq": 2}\n')
    with pytest.raises(LedgerError, match="line 2"):
        list(read_ledger(path))
    with pytest.raises(LedgerError, match="no ledger"):
        list(read_ledger(tmp_path / "nothing.jsonl"))


@pytest.mark.parametrize("room", range(0, 60, 7))
def test_an_entry_that_does_not_fit_is_not_recorded_in_part_nor_is_a_later_one(
    tmp_path: Path, room: int
) -> None:
    """The system writes what fits, and refuses the rest. A shorter entry would fit, but must not follow."""
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        ledger.record(entry("group", "issued", id="g1"))
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + room, before[1]))
        try:
            with pytest.raises(LedgerError, match=r"cannot record g2: File too large; .*--resume"):
                ledger.record(entry("group", "issued", id="g2"))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        with pytest.raises(LedgerError, match="cannot record g2"):
            ledger.record(entry("group", "issued", id="g3"))
    with Ledger(path) as ledger:
        ledger.record(entry("group", "issued", id="g4"))
    assert [(one["seq"], one["id"]) for one in read_ledger(path)] == [(0, "g1"), (1, "g4")]


async def test_entries_are_recorded_while_earlier_ones_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, responds = threading.Event(), threading.Event()

    def fsync(handle: int) -> None:
        reached.set()
        assert responds.wait(5), "the event loop waits for the disk"

    monkeypatch.setattr("tidegate.trainer.ledger.ledger.os.fsync", fsync)
    path = tmp_path / "ledger.jsonl"
    with Ledger(path) as ledger:
        ledger.record(entry("run", "publishing", version=1, step=1))
        syncing = asyncio.create_task(ledger.durable())
        await eventually(reached.is_set)
        ledger.record(entry("group", "issued", id="g1"))
        assert not syncing.done()
        responds.set()
        await syncing
    assert [one["event"] for one in read_ledger(path)] == ["publishing", "issued"]

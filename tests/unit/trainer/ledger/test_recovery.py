"""What a resumed run reads from a ledger: restored groups, trained groups, used version numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from tests.unit.trainer.learning_fixtures import make_trajectory, make_turn
from tidegate.config import Settings, load_settings
from tidegate.errors import ConfigError, LedgerError
from tidegate.gateway.client import GroupRow
from tidegate.trainer.admission.core import Admission
from tidegate.trainer.admission.rules import Rules
from tidegate.trainer.admission.state import Phase, TaskTicket
from tidegate.trainer.batch.batcher import Batch, Batcher
from tidegate.trainer.checkpoint.checkpoint import Checkpoint
from tidegate.trainer.ledger.entries import LedgerEntry, State, entry
from tidegate.trainer.ledger.ledger import Ledger, read_ledger
from tidegate.trainer.ledger.state import LedgerState, cancel_interrupted, read_ledger_state, restore_group
from tidegate.trainer.records.trajectories import TrajectoryFiles
from tidegate.trainer.resume import ResumedRun, restore_admission, take_over
from tidegate.trainer.start import Start
from tidegate.types import Group, Trajectory, to_wire

RULES = Rules(groups_per_batch=2, group_size=2, min_group_size=2, max_staleness=3)


def written(path: Path, entries: list[LedgerEntry]) -> LedgerState:
    with Ledger(path) as ledger:
        for one in entries:
            ledger.record(one)
    return read_ledger_state(path)


def issued(name: str, index: int = 0) -> list[LedgerEntry]:
    return [
        entry("group", "issued", id=name, task=f"task-{name}", index=index, version=0, replaces=None),
        *(
            entry("attempt", "issued", id=f"{name}.{slot}.1", group=name, slot=slot, number=1)
            for slot in (0, 1)
        ),
    ]


def stepped(name: str, step: int, index: int = 0) -> list[LedgerEntry]:
    return [
        *issued(name, index),
        *(entry("attempt", "ended", id=f"{name}.{n}.1", state="stepped", outcome=None) for n in (0, 1)),
        entry("group", "ended", id=name, state="stepped", step=step, version=0, oldest=0, staleness=0),
    ]  # fmt: skip


def started(epoch: int, position: int | None = None, version: int = 0) -> LedgerEntry:
    return entry("run", "started", epoch=epoch, step=0, version=version, position=position)


def published(version: int) -> LedgerEntry:
    return entry("run", "publishing", version=version, step=version)


def tokens(name: str, *versions: int) -> Group:
    """A group as a step's file has it: each of its two episodes sampled under all of the versions."""
    members = []
    for slot in (0, 1):
        turns = [make_turn(number, None, [1, 2], [3], version=one) for number, one in enumerate(versions)]
        one = make_trajectory(turns)
        one.group_id, one.slot, one.session_id = name, slot, f"s-{name}-{slot}"
        members.append(one)
    return Group(name, f"task-{name}", members)


def start_of(entries: list[LedgerEntry], position: int, cursor: int) -> Start:
    past = LedgerState()
    for seq, one in enumerate(entries):
        past.apply({"seq": seq, **one})
    state = {"ledger": position, "cursor": cursor, "tickets": [], "quarantined": []}
    past.discard_after(position)
    return Start(Path(), 1, past.highest_version + 1, past, Checkpoint(Path(), 1, state))


def resumed(
    entries: list[LedgerEntry], position: int, kept: list[Group], ready: tuple[str, ...] = (), cursor: int = 0
) -> tuple[ResumedRun, list[LedgerEntry]]:
    """The book after a resume from the marker at `position`; and what it entered."""
    start = start_of(entries, position, cursor)
    book: list[LedgerEntry] = []
    opened = restore_admission(start, book.append, RULES, {group.id: group for group in kept}, ready)
    return opened, book


def ends(book: list[LedgerEntry], kind: str = "group") -> dict[str, str]:
    return {one["id"]: one["state"] for one in book if one["kind"] == kind and one["event"] == "ended"}


def test_an_absent_ledger_is_refused_and_a_new_run_has_an_empty_past(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="there is no ledger"):
        read_ledger_state(tmp_path / "none.jsonl")
    past = LedgerState()
    assert (past.epoch, past.highest_version, past.live(), past.discarded_groups()) == (0, -1, [], [])


@pytest.mark.parametrize(
    "damage",
    [
        {"kind": "group", "event": "ended", "id": "a", "state": "stale"},
        {"kind": "group", "event": "put_back", "id": "a"},
        {"kind": "attempt", "event": "issued", "id": "a.0"},
        [],
    ],
)
def test_an_entry_that_cannot_be_followed_is_refused(tmp_path: Path, damage: Any) -> None:
    path = tmp_path / "ledger.jsonl"
    written(path, [started(1)])
    path.write_bytes(path.read_bytes() + json.dumps(damage).encode() + b"\n")
    with pytest.raises(LedgerError, match=r"ledger.jsonl, line 2 is damaged: "):
        read_ledger_state(path)


def test_only_what_lies_before_the_marker_is_trained(tmp_path: Path) -> None:
    first = [started(1), *stepped("a", 1)]
    past = written(tmp_path / "l", [*first, *stepped("b", 2)])
    past.discard_after(len(first))
    assert past.counts(past.groups) == {State.TRAINED: 1, State.STEPPED: 1}
    assert past.counts(past.attempts) == {State.TRAINED: 2, State.STEPPED: 2}
    assert past.discarded_groups() == ["b"]


def test_a_restored_group_is_live_and_may_become_trained(tmp_path: Path) -> None:
    """`b` lay behind the marker that epoch 2 went on from, and was trained on again there."""
    first = [started(1), *stepped("a", 1)]
    again = [one for one in stepped("b", 2) if one["event"] == "ended"]
    entries = [
        *first, *stepped("b", 2), started(2, position=len(first), version=5),
        entry("group", "put_back", id="b"), *again,
    ]  # fmt: skip
    past = written(tmp_path / "l", entries[: -len(again)])
    assert (past.live(), past.discarded_groups(), past.live_attempts("b")) == (
        ["b"],
        [],
        {0: "b.0.1", 1: "b.1.1"},
    )
    past = read_ledger_state(written_path(tmp_path / "m", entries))
    past.discard_after(len(entries))
    assert past.counts(past.groups) == {State.TRAINED: 2}


def written_path(path: Path, entries: list[LedgerEntry]) -> Path:
    written(path, entries)
    return path


def test_the_epoch_and_abandoned_versions_are_read_from_all_entries(tmp_path: Path) -> None:
    entries = [
        started(1), published(1), published(2), published(3), started(2, 3, version=4), published(5),
        published(6), started(3, 6, version=7),
    ]  # fmt: skip
    past = written(tmp_path / "l", entries)
    assert (past.epoch, past.highest_version) == (3, 7)
    assert past.abandoned == {3, 6}
    past.discard_after(0)
    assert past.abandoned == {1, 2, 3, 4, 5, 6, 7}, "without a marker all but the base model's"


def test_a_live_group_is_cancelled_attempts_first(tmp_path: Path) -> None:
    past = written(tmp_path / "l", [started(1), *issued("g")])
    book: list[LedgerEntry] = []
    cancel_interrupted(past, "g", book.append)
    assert [(one["id"], one["state"]) for one in book] == [
        ("g.0.1", "cancelled"),
        ("g.1.1", "cancelled"),
        ("g", "cancelled"),
    ]
    assert past.live() == []


def test_a_step_whose_entries_are_incomplete_is_discarded_as_a_whole(tmp_path: Path) -> None:
    past = written(tmp_path / "l", [started(1), *stepped("g", 1)[:-2]])
    past.discard_after(0)
    assert (past.live(), past.discarded_groups()) == (["g"], ["g"])
    restore_group(past, "g", lambda _: None)
    assert past.live_attempts("g") == {0: "g.0.1", 1: "g.1.1"}


def test_a_group_after_the_marker_continues_and_its_task_is_not_issued_again() -> None:
    first = [started(1), *stepped("a", 1, index=0)]
    entries = [*first, *stepped("b", 2, index=2)]
    opened, book = resumed(entries, len(first), [tokens("b", 0)], cursor=1)
    core = opened.admission
    assert [(one["event"], one.get("id")) for one in book] == [("started", None), ("put_back", "b")]
    assert [group.id for group in opened.leased] == ["b"]
    assert core.groups["b"].phase is Phase.LEASED
    assert (core.group_counts["live"], core.attempt_counts["live"], core.group_counts["stepped"]) == (1, 2, 0)
    assert [core.cursor.next() for _ in range(3)] == [TaskTicket(1), TaskTicket(3), TaskTicket(4)]


@pytest.mark.parametrize(
    ("versions", "why"),
    [((0,), "too old"), ((3,), "abandoned"), ((2, 3), "its newest token is abandoned"), ((), "not kept")],
)
def test_a_group_that_may_not_be_trained_on_ends_stale_and_is_replaced(
    versions: tuple[int, ...], why: str
) -> None:
    first = [started(1), published(1), published(2)]
    entries = [*first, published(3), *stepped("b", 2, index=0)]
    opened, book = resumed(entries, len(first), [tokens("b", *versions)] if versions else [], cursor=1)
    assert opened.admission.version == 4
    assert ends(book) == {"b": "stale"}, why
    assert ends(book, "attempt") == {"b.0.1": "stale", "b.1.1": "stale"}
    assert (opened.leased, opened.stale) == ([], ["b"])
    assert opened.admission.cursor.next() == TaskTicket(0, "b", 1)


def test_groups_that_had_not_ended_continue_if_their_tokens_exist_and_are_cancelled_otherwise() -> None:
    """`file` was about to be entered as stepped on, `gateway` was ready, `half` lacks an episode."""
    entries = [started(1)]
    for index, name in enumerate(("file", "gateway", "half", "ran")):
        entries += issued(name, index)
    half = tokens("half", 0)
    del half.trajectories[0]
    opened, book = resumed(entries, 1, [tokens("file", 0), half], ready=("gateway", "other"), cursor=4)
    assert ends(book) == {"half": "cancelled", "ran": "cancelled"}
    phases = {name: group.phase for name, group in opened.admission.groups.items()}
    assert phases == {"file": Phase.LEASED, "gateway": Phase.READY}
    assert opened.cancelled == ["half", "ran"]


@pytest.mark.parametrize("state", ["filtered", "stale", "cancelled"])
def test_a_group_whose_end_a_crash_interrupted_does_not_continue(state: str) -> None:
    """The gateway has all of its episodes, and one of its attempts has ended."""
    ended = entry("attempt", "ended", id="b.0.1", state=state, outcome="completed")
    opened, book = resumed([started(1), *issued("b"), ended], 1, [], ready=("b",), cursor=1)
    assert ends(book) == {"b": "cancelled"}
    assert ends(book, "attempt") == {"b.1.1": "cancelled"}, "none ends twice"
    assert opened.admission.groups == {}


def test_a_group_whose_worker_was_lost_continues() -> None:
    lost = entry("attempt", "ended", id="b.0.1", state="cancelled", outcome="cancelled", lost=True)
    again = entry("attempt", "issued", id="b.0.2", group="b", slot=0, number=2)
    opened, book = resumed([started(1), *issued("b"), lost, again], 1, [], ready=("b",), cursor=1)
    assert ends(book) == {}
    assert opened.admission.groups["b"].successful_attempts() == ["b.0.2", "b.1.1"]


@dataclass
class Gateway:
    """Holds the groups `rows`, by state; leases those that are ready, once."""

    rows: dict[str, str]
    epochs: list[int] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    acked: list[str] = field(default_factory=list)
    erased: list[str] = field(default_factory=list)
    clients: list[GroupRow] = field(default_factory=list)

    async def erased_groups(self) -> list[str]:
        return self.erased

    async def begin_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    async def list_groups(self) -> list[Any]:
        rows = [GroupRow(name, state, None, []) for name, state in self.rows.items()]
        return [*rows, *self.clients]

    async def drop_group(self, name: str, epoch: int, why: str) -> list[Trajectory]:
        assert epoch == self.epochs[-1]
        self.dropped.append(name)
        return []

    async def lease(self, *_: Any) -> list[Group]:
        there = [name for name, state in self.rows.items() if state != "live"]
        found = [tokens(name, 0) for name in there if name not in self.dropped]
        self.rows = {}
        for group in found:
            group.lease_id = f"lease-{group.id}"
        return found

    async def ack(self, _: int, lease_id: str, *__: Any) -> None:
        self.acked.append(lease_id)


async def test_a_new_trainer_takes_over_files_and_gateway_and_trains_on_both(tmp_path: Path) -> None:
    """`b` was stepped on and is in its file, and was never acknowledged; `c` was leased and in no batch
    yet; of `ran` the agents died; `done` had ended `trained` without the gateway being told."""
    files = TrajectoryFiles(tmp_path)
    kept = tokens("b", 0)
    lost = Batch(0, [0], [kept], [(tokens("x", 0), State.STALE)], 0.0, 0.0, [[1.0, -1.0]])
    done = Batch(0, [0], [tokens("done", 0)], [], 0.0, 0.0, [[1.0, -1.0]])
    files.batch(lost, 2)
    files.batch(done, 1)
    first = [started(1), *stepped("done", 1, index=0)]
    entries = [*first, *stepped("b", 2, index=1), *issued("c", 2), *issued("ran", 3)]
    gateway = Gateway({"done": "leased", "b": "leased", "c": "leased", "ran": "live", "theirs": "live"})
    book: list[LedgerEntry] = []
    opened = await take_over(
        start_of(entries, len(first), cursor=4), cast(Any, gateway), files, book.append, RULES
    )
    assert ends(book) == {"ran": "cancelled"}
    assert (gateway.epochs, gateway.dropped) == ([2], ["done", "b", "ran"])
    assert sorted(path.name for path in files.directory.rglob("*.jsonl")) == [
        "2_step_000002.jsonl",
        "step_000001.jsonl",
    ]
    batches = Batcher(
        gateway=cast(Any, gateway),
        admission=opened.admission,
        on_freed=lambda: None,
        should_train=lambda _: True,
    )
    for group in opened.leased:
        batches.add(group)
    batch = await batches.next_batch()
    assert [group.id for group in batch.groups] == ["b", "c"]
    assert to_wire(batch.groups[0].trajectories) == to_wire(kept.trajectories), "bit for bit"
    batches.record_step(batch, 2)
    await batches.end_trained(batch, 2)
    assert gateway.acked == ["lease-c"], "`b` has no lease any more"
    assert opened.admission.group_counts["stepped"] == 2


async def test_a_start_tells_how_much_feedback_of_the_downtime_is_lost_and_why(tmp_path: Path) -> None:
    """The checkpoint is of version 5; the trainer had published 6 and 7, and goes on as version 8."""
    first = [started(1), *(published(version) for version in range(1, 6))]
    entries = [*first, published(6), published(7)]
    versions = {"old": [1, 4], "kept": [5] * 5, "discarded": [6, 7, 7]}
    rows = [
        GroupRow(f"{name}-{number}", "ready", version, [], newest_version=version)
        for name, found in versions.items()
        for number, version in enumerate(found)
    ]
    open_one = GroupRow("open", "live", 7, [], client="me")
    unrewarded = GroupRow("unrewarded", "live", 7, [], client="me", outcome="unrewarded")
    gateway = Gateway({}, clients=[*rows, open_one, unrewarded], erased=["discarded-0"])
    resumed = await take_over(
        start_of(entries, len(first), 0), cast(Any, gateway), TrajectoryFiles(tmp_path), [].append, RULES
    )
    told = resumed.lost_feedback(5, 25)
    assert told is not None
    assert "8 of 10 conversations and groups of clients that wait are not trained on" in told
    assert "3 have tokens of versions after step 5" in told
    assert "trainer.checkpoint_every = 25" in told
    assert "2 are older than the staleness bound (trainer.max_staleness = 3)" in told
    assert "about 3 will exceed the bound before a batch takes them" in told, "a batch takes two"
    gateway.clients = [row for row in rows if row.id in ("kept-0", "kept-1")]
    resumed = await take_over(
        start_of(entries, len(first), 0), cast(Any, gateway), TrajectoryFiles(tmp_path), [].append, RULES
    )
    assert (len(resumed.waiting), resumed.lost_feedback(5, 25)) == (2, None)


@pytest.mark.parametrize("known", ["ledger", "gateway"])
async def test_what_a_client_erased_is_not_trained_on_again(tmp_path: Path, known: str) -> None:
    files = TrajectoryFiles(tmp_path)
    files.batch(Batch(0, [0], [tokens("b", 0)], [], 0.0, 0.0, [[1.0, -1.0]]), 2)
    first = [started(1), *stepped("done", 1, index=0)]
    entries = [*first, *stepped("b", 2, index=1)]
    gateway = Gateway({}, erased=["b"] if known == "gateway" else [])
    start, book = start_of(entries, len(first), cursor=4), list[LedgerEntry]()
    if known == "ledger":
        start.past.erased.add("b")
    opened = await take_over(start, cast(Any, gateway), files, book.append, RULES)
    assert opened.leased == []
    assert ends(book) == {"b": "stale"}


async def test_an_erased_group_that_waits_for_a_batch_ends_filtered(tmp_path: Path) -> None:
    gateway, book = Gateway({}), list[LedgerEntry]()
    gateway.epochs.append(1)
    admission = Admission(RULES, book.append)
    batches = Batcher(
        gateway=cast(Any, gateway), admission=admission, on_freed=lambda: None, should_train=lambda _: True
    )
    group = tokens("waits", 0)
    for trajectory in group.trajectories:
        trajectory.client = "me"
    assert admission.accept(group) is None
    batches.add(group)
    saved: list[str] = []

    async def save(group: Group, _: State) -> None:
        saved.append(group.id)

    batches.save = save
    await batches.withdraw(["waits", "unknown"])
    assert saved == [], "its texts are erased"
    assert ends(book) == {"waits": "filtered"}
    assert len(admission.groups) == 0


def settings(tmp_path: Path) -> Settings:
    return load_settings(None, ["--model.path=model", f"--run.dir={tmp_path}", "--run.name=r"])


def test_a_run_that_never_committed_begins_again_under_new_versions(tmp_path: Path) -> None:
    run_dir = tmp_path / "r"
    run_dir.mkdir()
    written(run_dir / "ledger.jsonl", [started(1), entry("run", "publishing", version=3, step=3)])
    start = Start.of(settings(tmp_path), resume=True)
    assert (start.step, start.version, start.checkpoint) == (0, 4, None)
    with Ledger(run_dir / "ledger.jsonl") as ledger:
        admission = restore_admission(start, ledger.record, Rules.of(settings(tmp_path)), {}).admission
        assert (admission.epoch, admission.version, admission.versions.abandoned) == (2, 4, {3})
        assert admission.versions.reserve(1) == 5
    *_, begun, _ = read_ledger(run_dir / "ledger.jsonl")
    assert begun["rules"] == {
        "groups_per_batch": 16, "group_size": 8, "min_group_size": 8, "max_staleness": 2, "max_attempts": 3,
        "max_infra_attempts": 10,
    }  # fmt: skip


def test_a_taken_directory_and_a_missing_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run to resume"):
        Start.of(settings(tmp_path), resume=True)
    (tmp_path / "r").mkdir()
    written(tmp_path / "r" / "ledger.jsonl", [started(1)])
    with pytest.raises(ConfigError, match="--resume"):
        Start.of(settings(tmp_path), resume=False)


def committed_run(tmp_path: Path) -> tuple[Path, int]:
    """A run with a checkpoint after seven of its entries, and a version published behind it; the position."""
    run_dir = tmp_path / "r"
    run_dir.mkdir()
    with Ledger(run_dir / "ledger.jsonl") as ledger:
        for one in [started(1), *stepped("a", 1)]:
            ledger.record(one)
        state = {"ledger": ledger.position, "ledger_checksum": ledger.checksum}
        position = ledger.position
        for one in [published(1), published(2)]:
            ledger.record(one)
    marker = run_dir / "checkpoints" / "step_1" / "COMMITTED"
    marker.parent.mkdir(parents=True)
    marker.write_text(json.dumps({**state, "step": 1, "cursor": 1, "tickets": [], "quarantined": []}))
    (run_dir / "weights" / "v000002").mkdir(parents=True)
    return run_dir, position


def test_a_whole_ledger_is_resumed_from(tmp_path: Path) -> None:
    committed_run(tmp_path)
    assert Start.of(settings(tmp_path), resume=True).version == 3


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines, at: lines[: at - 1], r"it has 6 entries, but had 7 at the checkpoint"),
        (lambda lines, at: [], r"it has 0 entries, but had 7 at the checkpoint"),
        (lambda lines, at: [*lines[:2], *lines[3:]], r"line 3 is entry 3, not 2"),
        (lambda lines, at: [*lines[:-2], lines[-1]], r"line 8 is entry 8, not 7"),
        (lambda lines, at: lines[:-1], r"version 2 was published, but its highest version is 1"),
        (
            lambda lines, at: [lines[0], lines[1].replace(b"task-a", b"task-b"), *lines[2:]],
            r"first 7 entries were",
        ),
        (lambda lines, at: [*lines[:-1], b"{\n"], r"line 9 is damaged"),
    ],
    ids=["shorter", "empty", "lacks one", "lacks one behind", "lacks the last", "changed", "not JSON"],
)
def test_an_incomplete_ledger_is_refused_with_what_can_be_done(
    tmp_path: Path, damage: Callable[[list[bytes], int], list[bytes]], message: str
) -> None:
    """Versions that were published must never be given again to other weights."""
    run_dir, position = committed_run(tmp_path)
    ledger = run_dir / "ledger.jsonl"
    ledger.write_bytes(b"".join(damage(ledger.read_bytes().splitlines(keepends=True), position)))
    with pytest.raises(LedgerError, match=message) as caught:
        Start.of(settings(tmp_path), resume=True)
    assert f"--model.path {run_dir}/checkpoints/step_1 --run.name NEW" in str(caught.value)


def test_a_ledger_that_was_removed_does_not_make_its_run_a_new_one(tmp_path: Path) -> None:
    run_dir, _ = committed_run(tmp_path)
    (run_dir / "ledger.jsonl").unlink()
    with pytest.raises(ConfigError, match="--resume"):
        Start.of(settings(tmp_path), resume=False)
    with pytest.raises(LedgerError, match="0 entries"):
        Start.of(settings(tmp_path), resume=True)

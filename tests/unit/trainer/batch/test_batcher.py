"""Assembly of batches with a scripted gateway: filtered and replaced groups, and their metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest

from tests.slow_files import slow_file
from tests.unit.trainer.learning_fixtures import make_trajectory, make_turn
from tests.waiting import eventually
from tidegate.config import TrainerSettings
from tidegate.errors import TrainingError
from tidegate.observer import Observer
from tidegate.trainer.admission.core import Admission
from tidegate.trainer.admission.rules import Rules
from tidegate.trainer.admission.state import Phase
from tidegate.trainer.batch import batcher
from tidegate.trainer.batch.batcher import Batcher, GroupFilter
from tidegate.trainer.batch.credit import BaselineCredit
from tidegate.trainer.ledger.entries import State
from tidegate.trainer.records.client_log import ClientLog
from tidegate.trainer.records.metrics import MetricsLog
from tidegate.trainer.records.recorder import Recorder
from tidegate.trainer.records.trajectories import TrajectoryFiles
from tidegate.trainer.records.writer import FileWriter
from tidegate.types import Group, Outcome, Trajectory

ALIKE, APART = [1.0, 1.0], [0.0, 1.0]


@dataclass
class Gateway:
    """Hands out groups whose rewards are scripted, one a lease, as soon as admission may start one."""

    admission: Admission
    rewards: list[list[float]]
    acked: list[tuple[str, str]] = field(default_factory=list)

    async def lease(self, *_: Any) -> list[Group]:
        group = self.admission.start_group(self.admission.cursor.next(), f"t{len(self.rewards)}")
        assert group is not None
        for slot in range(2):
            self.admission.end_attempt(self.admission.start_attempt(group.id, slot), Outcome.COMPLETED)
        members = [_episode(group.id, slot, reward) for slot, reward in enumerate(self.rewards.pop(0))]
        return [Group(group.id, group.task, members, f"lease-{group.id}")]

    async def ack(self, _: int, lease_id: str, outcome: str, step: int | None = None) -> None:
        self.acked.append((lease_id, str(outcome)))


def _episode(group: str, slot: int, reward: float) -> Trajectory:
    found = make_trajectory([make_turn(0, None, [1, 2], [3, 4, 5])])
    found.session_id, found.group_id, found.slot, found.reward = f"{group}-{slot}", group, slot, reward
    return found


def gathered(rewards: list[list[float]], *, dynamic_sampling: bool) -> tuple[Batcher, Gateway, list[Any]]:
    book: list[Any] = []
    rules = Rules(groups_per_batch=2, group_size=2, min_group_size=2, max_staleness=0)
    admission = Admission(rules, book.append)
    gateway = Gateway(admission, rewards)
    credit = BaselineCredit(TrainerSettings(dynamic_sampling=dynamic_sampling))
    return (
        Batcher(
            gateway=cast(Any, gateway),
            admission=admission,
            on_freed=lambda: None,
            should_train=credit.should_train,
        ),
        gateway,
        book,
    )


async def test_groups_without_a_gradient_are_filtered_and_replaced() -> None:
    batches, gateway, book = gathered([ALIKE, APART, ALIKE, APART], dynamic_sampling=True)
    batch = await batches.next_batch()
    assert [group.rewards() for group in batch.groups] == [APART, APART]
    assert [group.rewards() for group, _ in batch.dropped] == [ALIKE, ALIKE]
    ended = [(one["id"], one["state"]) for one in book if one["kind"] == "group" and one["event"] == "ended"]
    assert ended == [("g1-000001", "filtered"), ("g1-000003", "filtered")]
    assert [outcome for _, outcome in gateway.acked] == ["filtered", "filtered"]
    batches.record_step(batch, 1)
    await batches.end_trained(batch, 1)
    told = batches.tokens.metrics()
    assert (told["tokens/used_total"], told["tokens/wasted_filtered"], told["tokens/used_ratio"]) == (
        12,
        12,
        0.5,
    )


async def test_no_batch_takes_a_group_that_became_stale_while_another_was_saved() -> None:
    batches, gateway, _ = gathered([APART, APART], dynamic_sampling=True)
    versions = batches.admission.versions
    for oldest in (0, 1):
        await batches._lease_and_filter(0.0)
        list(batches.admission.groups.values())[-1].oldest = oldest
    versions.live = versions.reserved = 1

    async def goes_live(*_: Any) -> None:
        versions.live = versions.reserved = 2

    batches.save = goes_live
    assert await batches.next_batch(1, lambda: True) is None
    assert [outcome for _, outcome in gateway.acked] == ["stale", "stale"]


async def test_a_dropped_group_is_saved_when_it_is_dropped_and_before_any_batch() -> None:
    batches, _, book = gathered([ALIKE, ALIKE, APART, APART], dynamic_sampling=True)
    saved: list[tuple[str, str]] = []

    async def save(group: Group, state: State) -> None:
        assert (book[-1]["id"], book[-1]["state"]) == (group.id, state), "after the entry of its end"
        saved.append((group.id, state.value))

    batches.save = save
    batch = await batches.next_batch()
    assert saved == [("g1-000001", "filtered"), ("g1-000002", "filtered")]
    batch.untrained = [batch.groups[0].id]
    await batches.end_untrained(batch, saved=True)
    assert len(saved) == 2, "the step's file has it"
    batch.untrained = [group.id for group in batch.groups[1:]]
    await batches.end_untrained(batch)
    assert saved[2:] == [(batch.untrained[0], "filtered")], "no step's file has it"


async def test_every_leased_group_has_the_answer_of_its_task() -> None:
    batches, _, _ = gathered([ALIKE, APART, APART], dynamic_sampling=True)
    batches.answer = lambda group: f"answer {group.ticket.index}" if group.ticket is not None else None
    batch = await batches.next_batch()
    groups = [*(group for group, _ in batch.dropped), *batch.groups]
    assert [[one.answer for one in group.trajectories] for group in groups] == [
        [f"answer {index}"] * 2 for index in range(3)
    ]


async def test_without_dynamic_sampling_they_are_members_of_the_batch_at_advantage_zero() -> None:
    batches, gateway, _ = gathered([ALIKE, APART, APART], dynamic_sampling=False)
    batch = await batches.next_batch()
    assert [group.rewards() for group in batch.groups] == [ALIKE, APART]
    assert (batch.dropped, gateway.acked) == ([], [])
    batch.advantages = BaselineCredit(TrainerSettings())(batch.groups)
    assert batch.advantages[0] == [0.0, 0.0]
    rows = batch.rows()
    assert {row.group_id for row in rows} == {group.id for group in batch.groups}
    assert all(row.mask.any() for row in rows), "their tokens count as trained ones"


@pytest.mark.parametrize("dynamic_sampling", [True, False])
async def test_the_share_of_groups_without_variance_is_recorded_either_way(
    dynamic_sampling: bool, tmp_path: Path
) -> None:
    batches, _, _ = gathered([ALIKE, APART, APART], dynamic_sampling=dynamic_sampling)
    recorder = Recorder(
        MetricsLog(tmp_path), TrajectoryFiles(tmp_path), cast(Observer, None), dict, lambda: 0
    )
    found = recorder.batch_metrics(await batches.next_batch(), 1)
    assert found["reward/zero_variance_ratio"] == pytest.approx(1 / 3 if dynamic_sampling else 1 / 2)


async def test_groups_that_are_all_solved_and_all_failed_are_two_numbers(tmp_path: Path) -> None:
    batches, _, book = gathered([ALIKE, [0.0, 0.0], [0.0, 0.0], APART, APART], dynamic_sampling=True)
    recorder = Recorder(
        MetricsLog(tmp_path), TrajectoryFiles(tmp_path), cast(Observer, None), dict, lambda: 0
    )
    found = recorder.batch_metrics(await batches.next_batch(), 1)
    assert (found["reward/all_solved_ratio"], found["reward/all_failed_ratio"]) == (1 / 5, 2 / 5)
    assert batches.admission.filtered_alike == {"solved": 1, "failed": 2, "cut": 0}
    ended = [one for one in book if (one["kind"], one["event"]) == ("group", "ended")]
    assert [(one["solved"], one["episodes"]) for one in ended] == [(2, 2), (0, 2), (0, 2)]


async def test_a_group_that_failed_because_every_reply_was_cut_is_counted(tmp_path: Path) -> None:
    batches, gateway, _ = gathered([[0.0, 0.0], [0.0, 0.0], ALIKE, APART, APART], dynamic_sampling=True)
    lease, first = gateway.lease, []

    async def cut(*arguments: Any) -> list[Group]:
        groups = await lease(*arguments)
        if groups and not first:
            first.append(groups[0].id)
            for episode in groups[0].trajectories:
                episode.turns[0].finish_reason = "length"
        return groups

    batches.gateway = cast(Any, SimpleNamespace(lease=cut, ack=gateway.ack))
    await batches.next_batch()
    assert batches.admission.filtered_alike == {"solved": 1, "failed": 2, "cut": 1}


async def test_a_filter_of_the_users_own_ends_groups_and_is_named_in_the_ledger(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("def keep(group):\n    return group.id != 'g1-000002'\n")
    batches, _, book = gathered([ALIKE, APART, APART, APART], dynamic_sampling=True)
    batches.own_filter = GroupFilter(f"{file}:keep")
    batch = await batches.next_batch()
    assert [group.id for group in batch.groups] == ["g1-000003", "g1-000004"]
    ended = [(one["id"], one.get("why")) for one in book if (one["kind"], one["event"]) == ("group", "ended")]
    assert ended == [("g1-000001", None), ("g1-000002", f"{file}:keep")]


@pytest.mark.parametrize(("body", "words"), [("1 / 0", "ZeroDivisionError"), ("None", "must return True")])
async def test_a_filter_that_fails_ends_the_run_by_its_name(tmp_path: Path, body: str, words: str) -> None:
    file = tmp_path / "own.py"
    file.write_text(f"def keep(group):\n    return {body}\n")
    batches, _, _ = gathered([APART, APART], dynamic_sampling=True)
    batches.own_filter = GroupFilter(f"{file}:keep")
    with pytest.raises(TrainingError, match=rf"trainer.filter = .*own.py:keep.*{words}"):
        await batches.next_batch()


async def test_a_group_that_admission_did_not_issue_counts_nowhere() -> None:
    batches, gateway, book = gathered([APART, APART], dynamic_sampling=True)
    foreign = Group("theirs", "t", [_episode("theirs", slot, -99.0) for slot in range(2)], "lease-theirs")
    own = gateway.lease
    leased = [foreign]

    async def lease(*_: Any) -> list[Group]:
        return [leased.pop()] if leased else await own()

    batches.gateway = cast(Any, SimpleNamespace(lease=lease, ack=gateway.ack))
    batch = await batches.next_batch()
    assert [group.id for group in batch.groups] == ["g1-000001", "g1-000002"]
    assert batch.dropped == []
    assert gateway.acked == [("lease-theirs", "unknown")]
    assert "theirs" not in {one.get("id") for one in book}


class Scores:
    """Records what a batch asks of a teacher."""

    def __init__(self) -> None:
        self.log: list[tuple[str, Any]] = []

    def begin(self, group: Group) -> None:
        self.log.append(("begin", group.id))

    def drop(self, group_id: str) -> None:
        self.log.append(("drop", group_id))

    async def finish(self, groups: Any) -> float:
        self.log.append(("finish", list(groups)))
        return 2.5


async def test_groups_are_scored_from_their_lease_on_and_filtered_ones_are_not() -> None:
    batches, _, _ = gathered([ALIKE, APART, APART], dynamic_sampling=True)
    batches.scorer = scores = Scores()
    batch = await batches.next_batch()
    assert batch.scored_s == 2.5
    kept = [group.id for group in batch.groups]
    begun = [("begin", name) for name in kept]
    assert scores.log == [("drop", "g1-000001"), *begun, ("finish", kept)]


async def test_a_clients_group_may_be_withdrawn_while_its_line_is_written(tmp_path: Path) -> None:
    batches, gateway, book = gathered([APART, APART], dynamic_sampling=True)
    erased = Group("me.1", "conversation", [_episode("me.1", slot, 1.0) for slot in range(2)], "lease-me.1")
    for one in erased.trajectories:
        one.client = "me"
    own, leased = gateway.lease, [erased]

    async def lease(*arguments: Any) -> list[Group]:
        return [leased.pop()] if leased else await own(*arguments)

    gateway.lease = lease  # type: ignore[method-assign]
    async with FileWriter() as writer:
        batches.offered = partial(writer.run, ClientLog(tmp_path).offered)
        with slow_file(tmp_path / "clients.jsonl") as slow:
            assembling = asyncio.create_task(batches.next_batch())
            await eventually(slow.reached.is_set)
            await batches.withdraw(["me.1"])
            slow.respond()
            batch = await asyncio.wait_for(assembling, 10)
    assert b'"state":"taken"' in slow.content()
    assert {group.id for group in batch.groups} == {"g1-000001", "g1-000002"}
    assert ("lease-me.1", "filtered") in gateway.acked
    ends = [one["state"] for one in book if one["id"] == "me.1" and one["event"] == "ended"]
    assert ends == ["filtered"]


async def during_a_step(batches: Batcher, reached: Callable[[], object]) -> None:
    async with batches.filtering():
        await eventually(reached)


async def test_groups_that_are_ready_during_a_step_are_filtered_before_the_next_batch() -> None:
    batches, gateway, book = gathered([ALIKE, ALIKE, APART, APART], dynamic_sampling=True)
    await during_a_step(batches, lambda: len(gateway.rewards) <= 2)
    ended = [one["state"] for one in book if one["kind"] == "group" and one["event"] == "ended"]
    assert ended == ["filtered", "filtered"]
    batch = await batches.next_batch()
    assert batch is not None
    assert [group.rewards() for group in batch.groups] == [APART, APART]
    assert [group.rewards() for group, _ in batch.dropped] == [ALIKE, ALIKE]


@pytest.mark.parametrize("by_clients", [False, True])
async def test_groups_of_clients_stay_at_the_gateway_during_a_step(
    by_clients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batcher, "FILTER_EVERY_S", 0)
    batches, gateway, _ = gathered([], dynamic_sampling=True)
    batches.clients_form_groups = by_clients
    gateway.lease = lease = AsyncMock(return_value=[])  # type: ignore[method-assign]
    async with batches.filtering():
        for _ in range(100):
            await asyncio.sleep(0)
    assert (lease.await_count == 0) == by_clients


async def test_a_failure_of_the_gateway_during_a_step_is_raised() -> None:
    batches, gateway, _ = gathered([], dynamic_sampling=True)
    gateway.lease = lease = AsyncMock(side_effect=OSError("no gateway"))  # type: ignore[method-assign]
    with pytest.raises(OSError, match="no gateway"):
        await during_a_step(batches, lambda: lease.await_count)


async def test_a_clients_group_whose_line_a_crash_prevented_has_it_after_the_resume(tmp_path: Path) -> None:
    batches, gateway, _ = gathered([], dynamic_sampling=True)
    group = Group("me.1", "conversation", [_episode("me.1", slot, float(slot)) for slot in range(2)], "lease")
    for one in group.trajectories:
        one.client = "me"
    batches.admission.accept(group)  # and then the trainer was killed
    past = batches.admission.groups["me.1"]
    resumed, _, _ = gathered([], dynamic_sampling=True)
    resumed.admission.resume_group(replace(past, phase=Phase.READY))
    resumed.offered = AsyncMock(wraps=lambda *line: ClientLog(tmp_path).offered(*line))
    gateway.lease = AsyncMock(return_value=[group])  # type: ignore[method-assign]
    resumed.gateway = cast(Any, gateway)
    assert await resumed.next_batch(interrupted=lambda: bool(resumed.offered.await_count)) is None
    assert b'"group":"me.1","client":"me","state":"taken"' in (tmp_path / "clients.jsonl").read_bytes()
    assert resumed.admission.groups["me.1"].phase is Phase.LEASED


async def test_an_episode_without_a_reply_does_not_make_its_group_stale() -> None:
    batches, gateway, _ = gathered([APART, APART], dynamic_sampling=True)
    lease = gateway.lease

    async def with_a_silent_episode(*arguments: Any) -> list[Group]:
        (group,) = await lease(*arguments)
        group.trajectories[0].turns = []  # its first prompt exceeded the context
        group.trajectories[0].outcome = Outcome.TRUNCATED
        return [group]

    gateway.lease = with_a_silent_episode  # type: ignore[method-assign]
    batch = await batches.next_batch()
    assert batch is not None
    assert [group.oldest_version() for group in batch.groups] == [0, 0]
    assert batch.dropped == []


async def test_groups_that_were_dropped_before_an_interrupted_wait_count_in_the_next_batch() -> None:
    batches, gateway, _ = gathered([ALIKE, APART, APART], dynamic_sampling=True)
    assert await batches.next_batch(interrupted=lambda: len(gateway.rewards) < 3) is None
    batch = await batches.next_batch()
    assert batch is not None
    assert [group.rewards() for group, _ in batch.dropped] == [ALIKE]


async def test_groups_of_a_skipped_step_count_in_the_next_batch() -> None:
    batches, _, _ = gathered([ALIKE, APART, APART, APART, APART], dynamic_sampling=True)
    batch = await batches.next_batch()
    assert batch is not None
    await batches.end_untrained(batch.without([group.id for group in batch.groups]))
    batch = await batches.next_batch()
    assert batch is not None
    assert [(group.rewards(), str(state)) for group, state in batch.dropped] == [
        (ALIKE, "filtered"), (APART, "filtered"), (APART, "filtered"),
    ]  # fmt: skip

"""The admission core: start rule, bound, failures, replacement. Without a rule its test fails."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest

from tidegate.config import load_settings
from tidegate.errors import LedgerError
from tidegate.trainer.admission.core import Admission
from tidegate.trainer.admission.rules import AttemptDecision, Rules
from tidegate.trainer.admission.state import TaskTicket
from tidegate.trainer.ledger.entries import LedgerEntry, entry
from tidegate.trainer.ledger.state import LedgerState
from tidegate.trainer.resume import restore_admission
from tidegate.trainer.start import Start
from tidegate.types import Outcome


def rules(**changes: object) -> Rules:
    plain: dict[str, object] = {
        "groups_per_batch": 2, "group_size": 2, "min_group_size": 2, "max_staleness": 1, "max_attempts": 2,
    }  # fmt: skip
    return Rules(**(plain | changes))  # type: ignore[arg-type]


class Driver:
    """Admission with the smallest hands: groups whose slots all end at once."""

    def __init__(self, **changes: object) -> None:
        self.book: list[LedgerEntry] = []
        self.core = Admission(rules(**changes), self.book.append)

    def start(self) -> str:
        ticket = self.core.cursor.next()
        group = self.core.start_group(ticket, f"task{ticket.index}")
        assert group is not None
        return group.id

    def finish(self, group: str, outcome: Outcome = Outcome.COMPLETED) -> AttemptDecision:
        decision = AttemptDecision.LATE
        for slot in range(self.core.rules.group_size):
            decision = self.core.end_attempt(self.core.start_attempt(group, slot), outcome)
            if decision is AttemptDecision.FAILED:
                break
        return decision

    def ready(self, oldest: int) -> str:
        group = self.start()
        assert self.finish(group) is AttemptDecision.READY
        self.core.lease(group, oldest)
        return group

    def publish(self, step: int) -> None:
        self.core.mark_live(self.core.versions.reserve(step))

    def ends(self, kind: str = "group") -> Counter[str]:
        return Counter(one["state"] for one in self.book if one["kind"] == kind and one["event"] == "ended")


def test_no_group_starts_beyond_the_capacity_until_the_next_publish() -> None:
    driver = Driver(max_staleness=1, publish_interval=2)
    assert driver.core.rules.capacity == (1 + 1) * 2 * 2
    groups = [driver.ready(0) for _ in range(8)]
    assert driver.core.blocked_by() is not None
    with pytest.raises(LedgerError, match="cannot start a group for task task8: 8 groups are in flight"):
        driver.start()
    selection = driver.core.select_batch()
    assert selection is not None
    assert selection == groups[:2]
    driver.core.step(selection, 1)
    assert driver.core.blocked_by() is not None, "a step alone makes no room: its version is not live"
    driver.publish(1)
    assert driver.core.blocked_by() is None


def test_on_policy_is_exactly_synchronous() -> None:
    driver = Driver(max_staleness=0)
    driver.ready(0), driver.ready(0)
    selection = driver.core.select_batch()
    assert selection is not None
    assert driver.core.blocked_by() is not None
    driver.core.step(selection, 1)
    assert driver.core.blocked_by() is not None
    driver.publish(1)
    assert driver.core.blocked_by() is None


@pytest.mark.parametrize(("oldest", "fresh"), [(4, False), (5, True), (6, True), (None, False), (9, False)])
def test_bound_is_hard_and_unknown_or_future_versions_are_never_fresh(
    oldest: int | None, fresh: bool
) -> None:
    driver = Driver(max_staleness=1)
    driver.core.versions.live = driver.core.versions.reserved = 6
    assert driver.core.versions.admissible(oldest) is fresh


def test_without_a_bound_everything_known_is_admissible() -> None:
    driver = Driver(max_staleness=None)
    driver.core.versions.live = 1000
    assert driver.core.versions.admissible(0)
    assert not driver.core.versions.admissible(None)


def test_stale_groups_are_dropped_when_the_batch_is_assembled_and_issued_again() -> None:
    driver = Driver(max_staleness=0, max_stale_retries=1)
    first, second = driver.ready(0), driver.ready(0)
    driver.core.versions.live = driver.core.versions.reserved = 1
    assert driver.core.end_stale_groups() == [first, second]
    assert driver.ends() == {"stale": 2}
    assert driver.core.stale_ages == {1: 2}
    again = driver.core.cursor.next()
    assert again == TaskTicket(0, first, 1)
    assert driver.core.cursor.next() == TaskTicket(1, second, 1)
    group = driver.core.start_group(again, "task0")
    assert group is not None
    assert driver.book[-1]["replaces"] == first
    driver.core.end_stale(group.id)
    assert driver.core.cursor.next() == TaskTicket(2), "its budget is spent: another task takes the place"


@pytest.mark.parametrize("abandoned", [False, True])
def test_no_batch_takes_a_group_that_exceeds_the_bound(abandoned: bool) -> None:
    driver = Driver(max_staleness=0)
    driver.ready(0), driver.ready(0)
    if abandoned:
        driver.core.versions.abandoned.add(0)
    else:
        driver.core.versions.live = driver.core.versions.reserved = 1
    with pytest.raises(LedgerError, match=r"group g1-000001 exceeds the staleness bound"):
        driver.core.select_batch()


def test_select_batch_takes_exactly_the_batch_in_order_of_completion() -> None:
    driver = Driver(max_staleness=3)
    slow = driver.start()
    done = [driver.ready(0) for _ in range(3)]
    selection = driver.core.select_batch()
    assert selection is not None
    assert selection == done[:2], "an unfinished group never blocks a finished one"
    assert driver.core.select_batch() is None
    assert driver.finish(slow) is AttemptDecision.READY


def test_failures_retry_the_slot_then_quarantine_the_task() -> None:
    driver = Driver(max_attempts=3)
    group = driver.start()
    decisions = []
    for _ in range(3):
        decisions.append(
            driver.core.end_attempt(driver.core.start_attempt(group, 0), Outcome.AGENT_ERROR, "boom")
        )
    assert decisions == [AttemptDecision.RETRY, AttemptDecision.RETRY, AttemptDecision.FAILED]
    assert driver.core.failures.quarantined == {"task0"}
    assert driver.core.start_group(TaskTicket(0), "task0") is None
    assert driver.ends("attempt") == {"failed": 3}
    assert driver.ends() == {"failed": 1}


def test_partial_group_is_ready_when_enough_slots_succeeded() -> None:
    driver = Driver(group_size=3, max_attempts=1, min_group_size=2)
    group = driver.start()
    core = driver.core
    assert core.end_attempt(core.start_attempt(group, 0), Outcome.COMPLETED) is AttemptDecision.WAIT
    assert core.end_attempt(core.start_attempt(group, 1), Outcome.TIMEOUT) is AttemptDecision.WAIT
    assert core.end_attempt(core.start_attempt(group, 2), Outcome.TRUNCATED) is AttemptDecision.READY
    assert len(core.groups[group].successful_attempts()) == 2


def test_all_failed_group_is_never_ready_and_its_running_attempts_end() -> None:
    driver = Driver(max_attempts=1)
    group = driver.start()
    core = driver.core
    running = core.start_attempt(group, 1)
    assert core.end_attempt(core.start_attempt(group, 0), Outcome.REWARD_ERROR) is AttemptDecision.FAILED
    assert driver.ends("attempt") == {"failed": 1, "cancelled": 1}
    assert core.end_attempt(running, Outcome.COMPLETED) is AttemptDecision.LATE, (
        "a late end never resurrects a group"
    )
    assert group not in core.groups


def test_cancelled_attempts_do_not_count_against_the_slot() -> None:
    driver = Driver(max_attempts=1)
    group = driver.start()
    for _ in range(5):
        attempt = driver.core.start_attempt(group, 0)
        assert driver.core.end_attempt(attempt, Outcome.CANCELLED) is AttemptDecision.RETRY
    assert driver.finish(group) is AttemptDecision.READY


def test_will_be_stale_names_only_groups_beyond_the_bound() -> None:
    driver = Driver(max_staleness=1)
    old, new, fresh = driver.start(), driver.start(), driver.start()
    assert driver.core.will_be_stale(3, {old: 1, new: 2, fresh: None, "unknown": 0}) == [old]


def test_no_progress_is_reported_only_after_failures_in_a_row() -> None:
    driver = Driver(max_attempts=1)
    for _ in range(7):
        driver.finish(driver.start(), Outcome.AGENT_ERROR)
    assert driver.core.streaks.no_progress_reason() is None
    driver.finish(driver.start(), Outcome.AGENT_ERROR)
    assert "8 groups all failed" in str(driver.core.streaks.no_progress_reason())
    driver.finish(driver.start())
    assert driver.core.streaks.no_progress_reason() is None


def test_a_batch_that_could_only_be_filtered_is_not_waited_for() -> None:
    driver = Driver(groups_per_batch=10)

    def filtered(number: int) -> None:
        for _ in range(number):
            driver.core.filter_group(driver.ready(0))

    filtered(319)
    assert driver.core.streaks.no_progress_reason() is None
    filtered(1)
    assert "320 groups were filtered" in str(driver.core.streaks.no_progress_reason())
    for _ in range(10):
        driver.ready(0)
    selection = driver.core.select_batch()
    assert selection is not None
    driver.core.step(selection, 1)
    assert driver.core.streaks.no_progress_reason() is None


@pytest.mark.parametrize(("step", "solved", "over"), [(1, 244, True), (1, 243, False), (0, 256, False)])
def test_nothing_is_left_to_learn_if_nearly_all_groups_of_a_run_with_steps_are_solved(
    step: int, solved: int, over: bool
) -> None:
    streaks = Admission(Driver().core.rules, lambda _: None, step=step).streaks
    for number in range(256):
        assert streaks.solved_reason() is None
        streaks.filter(solved=number < solved, cut=False)
    assert (streaks.solved_reason() is not None) is over
    assert (streaks.no_progress_reason() is None) is over
    streaks.step()
    assert streaks.solved_reason() is None


def test_only_the_last_attempt_quarantines_the_task() -> None:
    driver = Driver(max_attempts=2)
    group = driver.start()
    first = driver.core.start_attempt(group, 0)
    assert not driver.core.failures.would_quarantine(first, Outcome.TIMEOUT)
    driver.core.end_attempt(first, Outcome.TIMEOUT)
    assert not driver.core.failures.would_quarantine(first, Outcome.TIMEOUT), "it ended already"
    second, other = driver.core.start_attempt(group, 0), driver.core.start_attempt(group, 1)
    assert not driver.core.failures.would_quarantine(second, Outcome.CANCELLED)
    assert not driver.core.failures.would_quarantine(second, Outcome.COMPLETED)
    assert not driver.core.failures.would_quarantine(other, Outcome.TIMEOUT)
    assert driver.core.failures.would_quarantine(second, Outcome.TIMEOUT)
    driver.core.end_attempt(second, Outcome.TIMEOUT)
    assert driver.core.failures.quarantined == {"task0"}


def test_a_task_is_quarantined_once() -> None:
    driver = Driver(max_attempts=1, group_size=3)
    group = driver.start()
    one, other = driver.core.start_attempt(group, 0), driver.core.start_attempt(group, 1)
    assert driver.core.failures.would_quarantine(one, Outcome.TIMEOUT)
    driver.core.end_attempt(one, Outcome.TIMEOUT)
    assert not driver.core.failures.would_quarantine(other, Outcome.TIMEOUT), "the group may still be partial"


def test_versions_only_rise_and_are_announced_first() -> None:
    driver = Driver()
    with pytest.raises(LedgerError):
        driver.core.mark_live(1)
    version = driver.core.versions.reserve(1)
    driver.core.mark_live(version)
    with pytest.raises(LedgerError):
        driver.core.mark_live(version)
    assert [one["version"] for one in driver.book if one["event"] == "publishing"] == [1]
    failed, again = driver.core.versions.reserve(2), driver.core.versions.reserve(2)
    assert (failed, again) == (2, 3), "a number whose publish failed is spent"


def test_resume_gives_open_tasks_again_and_refuses_abandoned_versions() -> None:
    driver = Driver(max_staleness=5)
    driver.start(), driver.start()
    progress = driver.core.progress()
    assert progress == {"cursor": 2, "tickets": [asdict(TaskTicket(0)), asdict(TaskTicket(1))]}
    resumed = Admission(rules(max_staleness=5), lambda _: None, epoch=2, version=9)
    resumed.restore(progress)
    resumed.versions.abandoned = {7, 8}
    assert [resumed.cursor.next().index for _ in range(3)] == [0, 1, 2]
    assert resumed.versions.admissible(6)
    assert not resumed.versions.admissible(7)
    assert not resumed.versions.admissible(8)
    assert resumed.versions.admissible(9)
    assert not resumed.versions.admissible(6, 7), "a token of the lineage that was left, beside an older one"
    assert not resumed.versions.admissible(6, 9), (
        "whoever has such tokens on both sides may have some in between"
    )
    group = resumed.start_group(TaskTicket(0), "task0")
    assert group is not None
    assert group.id not in {one.get("id") for one in driver.book}, "ids never collide across epochs"


def test_the_task_of_a_group_that_a_stop_ended_is_issued_again() -> None:
    driver = Driver()
    first = driver.start()
    index = driver.core.groups[first].ticket.index
    driver.core.cancel_group(first)
    assert [ticket["index"] for ticket in driver.core.progress()["tickets"]] == [index]
    assert driver.core.cursor.next() == TaskTicket(
        index, None, 0
    )  # not as its replacement: nothing was stale
    assert driver.ends() == {"cancelled": 1}


def test_no_group_starts_that_no_step_is_left_for_and_what_is_lost_is_replaced() -> None:
    driver = Driver(max_staleness=2, steps=2)
    groups = [driver.ready(0) for _ in range(4)]
    assert "enough groups are in flight" in (driver.core.blocked_by() or "")
    driver.core.filter_group(groups.pop())
    groups.append(driver.ready(0))
    for step in (1, 2):
        assert driver.core.blocked_by() is not None
        selection = driver.core.select_batch()
        assert selection is not None
        driver.core.step(selection, step)
        driver.publish(step)
    assert (len(driver.core.groups), driver.core.blocked_by() is not None) == (0, True)
    assert driver.ends() == {"stepped": 4, "filtered": 1}, "exactly the groups that two steps take"


def test_a_resumed_run_starts_the_groups_of_the_steps_that_are_left() -> None:
    resumed = Admission(rules(max_staleness=5, steps=10), lambda _: None, epoch=2, version=9, step=9)
    for ticket in range(2):
        assert resumed.blocked_by() is None
        resumed.start_group(resumed.cursor.next(), f"task{ticket}")
    assert resumed.blocked_by() is not None


@pytest.mark.parametrize("dynamic_sampling", [True, False])
def test_how_many_groups_the_steps_take_is_known_where_none_is_filtered(dynamic_sampling: bool) -> None:
    settings = load_settings(
        None, ["--model.path=x", f"--trainer.dynamic_sampling={str(dynamic_sampling).lower()}"]
    )
    assert Rules.of(settings).steps == (None if dynamic_sampling else settings.trainer.steps)


def test_will_be_stale_names_running_and_ready_groups_and_no_leased_ones() -> None:
    driver = Driver(max_staleness=1, groups_per_batch=2)
    running, ready, leased = driver.start(), driver.start(), driver.start()
    assert driver.finish(ready) is AttemptDecision.READY
    assert driver.finish(leased) is AttemptDecision.READY
    driver.core.lease(leased, 0)
    assert driver.core.will_be_stale(2, {running: 0, ready: 0, leased: 0}) == [running, ready]
    assert driver.core.will_be_stale(1, {running: 0, ready: 0}) == []


@pytest.mark.parametrize("end", ["stale", "filtered", "failed"])
def test_each_way_to_end_a_group_makes_room_for_exactly_one_other(end: str) -> None:
    """There is no setting under which a batch goes short: what leaves the count is replaced."""
    driver = Driver(max_staleness=0, max_attempts=1, steps=1)
    dropped, kept = driver.start(), driver.ready(0)
    assert driver.core.blocked_by() is not None
    if end == "failed":
        driver.finish(dropped, Outcome.AGENT_ERROR)
    elif end == "filtered":
        driver.finish(dropped)
        driver.core.lease(dropped, 0)
        driver.core.filter_group(dropped)
    else:
        driver.core.end_stale(dropped)
    other = driver.ready(0)
    assert driver.core.blocked_by() is not None, "one for one"
    selection = driver.core.select_batch()
    assert selection is not None
    assert selection == [kept, other]
    assert driver.ends() == {end: 1}


def test_commit_makes_stepped_groups_and_attempts_trained() -> None:
    driver = Driver()
    driver.ready(0), driver.ready(0)
    selection = driver.core.select_batch()
    assert selection is not None
    driver.core.step(selection, 1)
    assert driver.core.attempt_counts["stepped"] == 4
    driver.core.commit()
    assert (driver.core.group_counts["trained"], driver.core.attempt_counts["trained"]) == (2, 4)
    assert driver.core.group_counts["stepped"] == driver.core.attempt_counts["stepped"] == 0


def test_quarantined_tasks_stay_so_after_a_resume() -> None:
    driver = Driver(max_attempts=1)
    task = driver.core.groups[driver.start()].task
    assert driver.finish(next(iter(driver.core.groups)), Outcome.AGENT_ERROR) is AttemptDecision.FAILED
    past = LedgerState()
    for seq, one in enumerate(driver.book):
        past.apply({**one, "seq": seq})
    again = Start(Path(), version=1, past=past)
    assert restore_admission(
        again, driver.book.append, driver.core.rules, {}
    ).admission.failures.quarantined == {task}
    again.lift_quarantine = True
    core = restore_admission(again, driver.book.append, driver.core.rules, {}).admission
    assert core.start_group(core.cursor.next(), task) is not None
    assert {"event": "lifted", "task": task}.items() <= driver.book[-2].items()
    past.apply({**driver.book[-2], "seq": len(driver.book)})
    assert past.quarantined == set(), "the next resume knows of it too"


def test_a_group_whose_slowest_episode_runs_holds_one_place_and_not_all() -> None:
    driver = Driver(group_size=4, min_group_size=4, groups_per_batch=8, max_running=8)
    core = driver.core
    slow = [driver.start(), driver.start()]
    attempts = {group: [core.start_attempt(group, slot) for slot in range(4)] for group in slow}
    assert "8 episodes are in progress" in (core.blocked_by() or "")
    for group in slow:
        for attempt in attempts[group][:-2]:
            core.end_attempt(attempt, Outcome.COMPLETED)
    assert core._in_flight.unsettled == 4
    third = driver.start()
    assert core.blocked_by() is not None
    core.end_stale(third)
    assert core._in_flight.unsettled == 4, "what ends gives its places back"


def test_a_group_larger_than_the_limit_runs_alone() -> None:
    driver = Driver(group_size=4, min_group_size=4, groups_per_batch=8, max_running=2)
    driver.start()
    assert driver.core.blocked_by() is not None


def infra(driver: Driver, group: str, slot: int, number: int) -> list[AttemptDecision]:
    core, down = driver.core, Outcome.INFRA_ERROR
    return [core.end_attempt(core.start_attempt(group, slot), down, "no engine") for _ in range(number)]


def test_infra_errors_have_a_budget_of_their_own_and_quarantine_nothing() -> None:
    driver = Driver(max_attempts=2, max_infra_attempts=3)
    group = driver.start()
    assert infra(driver, group, 0, 2) == [AttemptDecision.RETRY] * 2
    attempt = driver.core.start_attempt(group, 0)
    assert driver.core.end_attempt(attempt, Outcome.AGENT_ERROR) is AttemptDecision.RETRY, (
        "the first of its own"
    )
    last = driver.core.start_attempt(group, 0)
    assert driver.core.failures.would_quarantine(last, Outcome.AGENT_ERROR)
    assert not driver.core.failures.would_quarantine(last, Outcome.INFRA_ERROR)
    assert driver.core.end_attempt(last, Outcome.INFRA_ERROR) is AttemptDecision.FAILED
    assert driver.core.failures.quarantined == set()
    assert driver.ends() == {"failed": 1}


def outage(driver: Driver) -> list[str]:
    """One in which eight attempts ended; the groups that they were of."""
    groups = [driver.start() for _ in range(4)]
    for group in groups:
        for slot in range(2):
            infra(driver, group, slot, 1)
    assert "8 of the last 8 attempts ended infra_error, the last: no engine" in str(driver.core.blocked_by())
    return groups


def test_an_outage_pauses_issuing_and_one_probe_at_a_time_finds_its_end() -> None:
    driver = Driver(max_attempts=1, max_infra_attempts=2, groups_per_batch=8)
    core, groups = driver.core, outage(driver)
    for _ in range(20):  # as many as it takes: no slot's budget is touched
        probe = core.start_attempt(groups[0], 0)
        assert not core.outage.may_attempt()
        with pytest.raises(LedgerError, match=r"cannot start .* in an outage: "):
            core.start_attempt(groups[1], 0)
        assert core.end_attempt(probe, Outcome.INFRA_ERROR) is AttemptDecision.RETRY
    core.end_attempt(core.start_attempt(groups[0], 0), Outcome.COMPLETED)
    assert core.outage.may_attempt()
    assert core.blocked_by() is None
    told = [one["event"] for one in driver.book if one["kind"] == "run"]
    assert told == ["paused", "resumed"]


def test_a_policys_failure_as_the_probe_ends_the_outage_and_is_charged() -> None:
    driver = Driver(max_attempts=1, groups_per_batch=8)
    core, groups = driver.core, outage(driver)
    probe = core.start_attempt(groups[0], 0)
    assert core.failures.would_quarantine(probe, Outcome.AGENT_ERROR)
    assert core.end_attempt(probe, Outcome.AGENT_ERROR) is AttemptDecision.FAILED
    assert core.outage.why is None
    assert core.failures.quarantined == {"task0"}


def test_a_probe_whose_worker_is_lost_shows_no_end_of_the_outage_and_is_not_charged() -> None:
    driver = Driver(max_infra_attempts=2, groups_per_batch=8)
    core, groups = driver.core, outage(driver)
    for _ in range(5):
        probe = core.start_attempt(groups[0], 0)
        assert core.end_attempt(probe, Outcome.CANCELLED) is AttemptDecision.RETRY
    assert core.outage.why is not None
    assert core.outage.may_attempt()


def test_a_probe_whose_group_ends_makes_room_for_another_one() -> None:
    driver = Driver(groups_per_batch=8)
    core, groups = driver.core, outage(driver)
    core.start_attempt(groups[0], 0)
    core.end_stale(groups[0])
    assert core.outage.may_attempt()
    for group in groups[1:]:
        core.end_stale(group)
    assert core.blocked_by() is None, "where nothing runs a new group is the probe"


def test_failures_while_no_engine_responds_are_not_charged() -> None:
    driver = Driver(max_attempts=1)
    core, group = driver.core, driver.start()
    one, other = core.start_attempt(group, 0), core.start_attempt(group, 1)
    core.outage.set_down("no engine serves")
    assert "no engine serves" in str(core.blocked_by())
    for attempt, outcome in ((one, Outcome.TIMEOUT), (other, Outcome.INFRA_ERROR)):
        assert not core.failures.would_quarantine(attempt, outcome)
        assert core.end_attempt(attempt, outcome) is AttemptDecision.RETRY
    assert not core.outage.may_attempt()
    assert [one["spared"] for one in driver.book if one.get("outcome")] == [True, True]
    core.outage.set_down(None)
    assert driver.finish(group) is AttemptDecision.READY


def test_an_older_ledgers_quarantine_for_an_outage_does_not_outlive_a_resume() -> None:
    past = LedgerState()
    for seq, outcome in enumerate(("infra_error", "agent_error")):
        past.apply({**entry("run", "quarantined", task=outcome, outcome=outcome), "seq": seq})
    assert past.quarantined == {"agent_error"}


def test_while_a_version_is_being_published_no_group_starts_on_the_one_before() -> None:
    driver = Driver(max_staleness=1)
    version = driver.core.versions.reserve(1)
    assert "version 1 is being published" in (driver.core.blocked_by() or "")
    driver.core.mark_live(version)
    assert driver.core.blocked_by() is None


def test_a_group_whose_end_cannot_be_recorded_fails_for_this_reason_each_time() -> None:
    """The run's end ends it again: a KeyError would hide that the disk is full."""
    full = False

    def record(line: LedgerEntry) -> None:
        if full:
            raise LedgerError("the disk is full")

    core = Admission(Rules(groups_per_batch=1, group_size=2, min_group_size=2, max_staleness=1), record)
    group = core.start_group(core.cursor.next(), "task")
    assert group is not None
    for slot in (0, 1):
        core.end_attempt(core.start_attempt(group.id, slot), Outcome.COMPLETED)
    core.lease(group.id, 0)
    full = True
    with pytest.raises(LedgerError, match="the disk is full"):
        core.filter_group(group.id)
    with pytest.raises(LedgerError, match="the disk is full"):
        core.cancel_group(group.id)

"""Blame: failures that neither the policy nor its task caused never quarantine a task."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.trainer.admission.core import Admission
from tidegate.trainer.admission.outage import THRESHOLD
from tidegate.trainer.admission.rules import AttemptDecision, Rules
from tidegate.trainer.ledger.entries import LedgerEntry
from tidegate.trainer.ledger.state import LedgerState
from tidegate.types import Outcome

CHARGED = (Outcome.AGENT_ERROR, Outcome.TIMEOUT, Outcome.REWARD_ERROR)


class Broken:
    """A run whose only failures are those of engines and of a service that agents and rewards call.

    Admission learns of lost engines at once, and of the service only by `infra_error`. While it does not know
    of an outage of the service, attempts end so; later, and after the outage, attempts that it touched end in
    any way.
    """

    def __init__(self, rules: Rules, rng: random.Random) -> None:
        self.book: list[LedgerEntry] = []
        self.core = Admission(rules, self.book.append)
        self.rng = rng
        self.engines = self.service = True
        self.running: dict[str, tuple[str, int, bool]] = {}
        """Attempt → its group and slot, and whether an outage touched it."""

    def event(self) -> None:
        roll = self.rng.random()
        if roll < 0.02:
            self.engines = not self.engines
            self.core.outage.set_down(None if self.engines else "no engine serves")
        elif roll < 0.04:
            self.service = not self.service
        if not (self.engines and self.service):
            self.running = {name: (group, slot, True) for name, (group, slot, _) in self.running.items()}
        if roll < 0.5:
            self.start()
        elif self.running:
            self.end(self.rng.choice(list(self.running)))

    def start(self) -> None:
        if self.core.blocked_by() is None:
            ticket = self.core.cursor.next()
            assert self.core.start_group(ticket, f"task{ticket.index}") is not None
        for group in self.core.groups.values():
            for number, slot in enumerate(group.slots):
                idle = slot.running is None and not slot.settled(self.core.rules)
                if idle and self.core.outage.may_attempt():
                    attempt = self.core.start_attempt(group.id, number)
                    self.running[attempt] = (group.id, number, not (self.engines and self.service))

    def end(self, attempt: str) -> None:
        _, _, touched = self.running.pop(attempt)
        outcome = Outcome.COMPLETED
        if touched and self.rng.random() < 0.9:
            outcome = Outcome.INFRA_ERROR
            known = self.core.outage.overlapped(attempt)
            if known and attempt == self.core.outage.probe:
                outcome = self.rng.choice((outcome, Outcome.TIMEOUT, Outcome.REWARD_ERROR))
            elif known:
                outcome = self.rng.choice((outcome, Outcome.CANCELLED, *CHARGED))
        assert not self.core.failures.would_quarantine(attempt, outcome)
        if self.core.end_attempt(attempt, outcome) is AttemptDecision.READY:
            self.core.cancel_group(attempt.rpartition(".")[0].rpartition(".")[0])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 4), st.integers(1, 10))
def test_outages_alone_quarantine_no_task(seed: int, attempts: int, size: int, infra: int) -> None:
    rules = Rules(
        groups_per_batch=3,
        group_size=size,
        min_group_size=1,
        max_staleness=2,
        max_attempts=attempts,
        max_infra_attempts=infra,
    )
    run = Broken(rules, random.Random(seed))
    for _ in range(600):
        run.event()
    assert run.core.failures.quarantined == set()
    assert not any(one["event"] == "quarantined" for one in run.book)
    assert all("infra" in cause or "lost" in cause or "outage" in cause for cause in run.core.failures.causes)


def make(**changes: int) -> tuple[Admission, list[LedgerEntry], str]:
    """One group of two slots; returns also its id."""
    book: list[LedgerEntry] = []
    core = Admission(Rules(**({"groups_per_batch": 8, "group_size": 2, "min_group_size": 2,
                               "max_staleness": 1, "max_attempts": 1} | changes)), book.append)  # fmt: skip
    group = core.start_group(core.cursor.next(), "task")
    assert group is not None
    return core, book, group.id


def suspect(core: Admission) -> None:
    """Have other groups' attempts suspect an outage of a service."""
    while core.outage.suspected is None:
        group = core.start_group(core.cursor.next(), "other")
        assert group is not None
        for slot in range(2):
            core.end_attempt(core.start_attempt(group.id, slot), Outcome.INFRA_ERROR, "no service")


@pytest.mark.parametrize("outcome", CHARGED)
def test_a_failure_after_an_outage_that_began_during_the_attempt_is_not_charged(outcome: Outcome) -> None:
    core, book, group = make()
    attempt = core.start_attempt(group, 0)
    core.outage.set_down("no engine serves")
    core.outage.set_down(None)
    later = core.start_attempt(group, 1)
    assert not core.failures.would_quarantine(attempt, outcome)
    assert core.end_attempt(attempt, outcome) is AttemptDecision.RETRY
    assert core.failures.causes == {f"{outcome.value}_in_outage": 1}
    assert book[-1].get("spared")
    assert core.end_attempt(later, outcome) is AttemptDecision.FAILED, "it began after the outage"
    assert core.failures.quarantined == {"task"}


@pytest.mark.parametrize("outcome", [Outcome.TIMEOUT, Outcome.REWARD_ERROR])
def test_a_probe_that_a_service_delays_does_not_end_the_outage(outcome: Outcome) -> None:
    core, _, group = make()
    suspect(core)
    probe = core.start_attempt(group, 0)
    assert core.end_attempt(probe, outcome) is AttemptDecision.RETRY
    assert core.outage.suspected is not None
    core.end_attempt(core.start_attempt(group, 0), Outcome.COMPLETED)
    assert core.outage.why is None


def test_slow_engines_quarantine_no_task_and_are_no_outage() -> None:
    """microsoft/agent-lightning#218, THUDM/slime#1562: rollouts of slow engines timed out and were lost."""
    core, book, group = make(group_size=1, min_group_size=1, max_infra_attempts=THRESHOLD + 1)
    for _ in range(THRESHOLD):
        attempt = core.start_attempt(group, 0)
        assert not core.failures.would_quarantine(attempt, Outcome.TIMEOUT, slow=True)
        assert core.end_attempt(attempt, Outcome.TIMEOUT, "slow", slow=True) is AttemptDecision.RETRY
    assert core.outage.why is None
    assert core.failures.causes == {"slow_engines": THRESHOLD}
    last = core.end_attempt(core.start_attempt(group, 0), Outcome.TIMEOUT, "slow", slow=True)
    assert last is AttemptDecision.FAILED, "a task whose agent never ends has a limit, too"
    assert core.failures.quarantined == set()
    assert all(one["slow"] for one in book if one["kind"] == "attempt" and one["event"] == "ended")


def test_no_group_starts_beyond_what_slow_engines_serve() -> None:
    core, _, _ = make()
    core.pace.limit = 3
    assert "tokens/s" in (core.blocked_by() or "")
    core.pace.limit = 4
    assert core.blocked_by() is None


def test_a_probe_that_slow_engines_delay_ends_the_outage() -> None:
    core, _, group = make()
    suspect(core)
    probe = core.start_attempt(group, 0)
    assert core.end_attempt(probe, Outcome.TIMEOUT, slow=True) is AttemptDecision.RETRY
    assert core.outage.why is None


def test_a_probe_is_none_any_more_when_engines_are_lost() -> None:
    core, _, group = make()
    suspect(core)
    probe = core.start_attempt(group, 0)
    core.outage.set_down("no engine serves")
    core.outage.set_down(None)
    assert core.end_attempt(probe, Outcome.AGENT_ERROR) is AttemptDecision.RETRY
    assert core.failures.quarantined == set()


def test_failures_that_an_outage_leaves_behind_are_not_evidence_of_another_one() -> None:
    core, _, group = make(group_size=THRESHOLD, min_group_size=1)
    attempts = [core.start_attempt(group, slot) for slot in range(THRESHOLD)]
    core.outage.set_down("no engine serves")
    core.outage.set_down(None)
    for attempt in attempts:
        core.end_attempt(attempt, Outcome.INFRA_ERROR)
    assert core.outage.why is None


def test_an_attempt_whose_process_exits_again_and_again_has_a_limit_and_blames_no_task() -> None:
    core, book, group = make(max_infra_attempts=3)
    decisions = [
        core.end_attempt(core.start_attempt(group, 0), Outcome.CANCELLED, "exited") for _ in range(3)
    ]
    assert decisions == [AttemptDecision.RETRY, AttemptDecision.RETRY, AttemptDecision.FAILED]
    assert core.failures.quarantined == set()
    assert core.failures.causes == {"worker_lost": 3}
    past = LedgerState()
    for seq, one in enumerate(book):
        past.apply({**one, "seq": seq})
    assert past.failures() == Counter({"worker_lost": 3})

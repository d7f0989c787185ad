"""Admission as a state machine: hypothesis chooses the events, and shrinks those that break a rule."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.admission_driver import Killed, World
from tests.unit.trainer.admission.test_admission_world import WORLDS
from tidegate.trainer.admission.rules import Rules
from tidegate.types import Outcome

EVENTS = 20_000
STEPS = 50
WHICH = st.integers(0, 2**16)


class Machine(RuleBasedStateMachine):
    """The world of the seeded driver; its dice decide only what is left when a process dies."""

    events: ClassVar[int] = 0
    crashes: ClassVar[int] = 0
    steps: ClassVar[int] = 0

    @initialize(rules=WORLDS, seed=st.integers(0, 2**32))
    def begin(self, rules: Rules, seed: int) -> None:
        self.world = World(rules, random.Random(seed), failure_rate=0, reject_rate=0)

    @precondition(lambda self: self.world.core.blocked_by() is None)
    @rule()
    def start(self) -> None:
        self._event(self.world.start)

    @precondition(lambda self: self.world.running)
    @rule(which=WHICH, fails=st.booleans())
    def end(self, which: int, fails: bool) -> None:
        self.world.failure_rate = float(fails)
        running = list(self.world.running)
        self._event(lambda: self.world.end(running[which % len(running)]))

    @precondition(lambda self: not self.world.fuse)
    @rule()
    def outage(self) -> None:
        """Nothing can be sampled any more, or it can again."""
        self._event(
            lambda: self.world.core.outage.set_down(None if self.world.core.outage.down else "no engine")
        )
        self._event(self.world.attempt_waiting)

    @rule()
    def all_succeed(self) -> None:
        self.world.failure_rate = 0.0
        for attempt in list(self.world.running):
            if attempt in self.world.running:  # no crash came between
                self._event(partial(self.world.end, attempt))

    @precondition(lambda self: self.world.ready)
    @rule(which=WHICH, rejected=st.booleans())
    def lease(self, which: int, rejected: bool) -> None:
        self.world.reject_rate = float(rejected)
        group = self.world.ready.pop(which % len(self.world.ready))
        self._event(lambda: self.world.lease(group))

    @precondition(lambda self: set(self.world.ready) - self.world.restored)
    @rule(which=WHICH)
    def stay_unranked(self, which: int) -> None:
        """A judge gives no verdict on a group whose slots are settled, and which is therefore not sealed."""
        settled = [group for group in self.world.ready if group not in self.world.restored]
        group = settled[which % len(settled)]
        self.world.ready.remove(group)
        self.world.unranked.add(group)
        self._event(lambda: self.world.core.fail_group(group, Outcome.REWARD_ERROR, "no verdict"))
        self._event(self.world.attempt_waiting)

    @rule()
    def train(self) -> None:
        self._event(self.world.train)

    @rule()
    def whole_batch(self) -> None:
        """What it takes for a step, as long as nothing comes between."""
        for _ in range(self.world.rules.groups_per_batch):
            if self.world.core.blocked_by() is None:
                self._event(self.world.start)
        self.all_succeed()
        self.world.reject_rate = 0.0
        while self.world.ready:
            self._event(partial(self.world.lease, self.world.ready.pop(0)))
        for _ in self.world.part_sizes:
            self._event(self.world.train)

    @precondition(lambda self: not self.world.fuse)
    @rule(entries=st.integers(1, 20))
    def doom(self, entries: int) -> None:
        """The process dies after so many entries."""
        self.world.fuse = entries

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            Machine.crashes += self.world.crashes
            Machine.steps += self.world.step

    def _event(self, event: Callable[[], None]) -> None:
        Machine.events += 1
        try:
            event()
        except Killed:
            self.world.crash()


@pytest.mark.slow
def test_twenty_thousand_chosen_events() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Machine,
        settings=settings(
            max_examples=EVENTS // STEPS,
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert Machine.events >= EVENTS
    assert Machine.crashes > 100
    assert Machine.steps > 100

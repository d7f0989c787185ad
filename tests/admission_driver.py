"""A seeded world around the admission core: agents that fail and straggle, publishes, crashes, resumes.

After every event it checks the invariants of the book and of the bound from the outside, with a book of
its own. `World.run(events)` raises AssertionError at the first one that breaks.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from tidegate.trainer.admission import Admission, Cut, Phase, Progress, Rules, Verdict
from tidegate.trainer.entries import Entry, State
from tidegate.trainer.resume import Past
from tidegate.types import Outcome

FAILURES = [
    Outcome.AGENT_ERROR, Outcome.TIMEOUT, Outcome.INFRA_ERROR, Outcome.REWARD_ERROR, Outcome.CANCELLED,
]  # fmt: skip


@dataclass
class Marker:
    """What a checkpoint would hold."""

    position: int
    version: int
    step: int
    progress: Progress


@dataclass
class World:
    rules: Rules
    rng: random.Random
    failure_rate: float = 0.1
    reject_rate: float = 0.3
    crash_rate: float = 0.0
    book: list[Entry] = field(default_factory=list)
    running: dict[str, tuple[str, int]] = field(default_factory=dict)
    oldest: dict[str, int] = field(default_factory=dict)
    ready: list[str] = field(default_factory=list)
    states: dict[str, str] = field(default_factory=dict)
    failures: Counter[tuple[str, int]] = field(default_factory=Counter)
    replaced: set[str] = field(default_factory=set)
    published: list[int] = field(default_factory=list)
    step: int = 0
    crashes: int = 0
    trained_steps: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.core = Admission(self.rules, self.enter)
        self.marker = Marker(0, 0, 0, Progress())

    # -------------------------------------------------------------- the outside book

    def enter(self, one: Entry) -> None:
        self.book.append({**one, "seq": len(self.book)})  # type: ignore[typeddict-item]
        if one["event"] == "publishing":
            assert not self.published or one["version"] > self.published[-1], "a version was used twice"
            self.published.append(one["version"])
        elif one["event"] == "issued":
            assert one["id"] not in self.states, f"{one['id']} was issued twice"
            self.states[one["id"]] = "live"
            if (old := one.get("replaces")) is not None:
                assert self.states[old] == "stale", f"{old} was replaced and is {self.states[old]}"
                assert old not in self.replaced, f"{old} was replaced twice"
                self.replaced.add(old)
        elif one["event"] == "ended":
            assert self.states[one["id"]] == "live", f"{one['id']} ended twice"
            self.states[one["id"]] = one["state"]
            if one["kind"] == "group" and one["state"] == "stepped":
                self._check_bound(one)

    def _check_bound(self, one: Entry) -> None:
        bound = self.rules.max_staleness
        truth = self.core.version - self.oldest[one["id"]]
        assert one["staleness"] == truth
        assert bound is None or truth <= bound, f"{one['id']} was trained at staleness {truth}"
        assert not any(self.oldest[one["id"]] in gone for gone in self.core.abandoned)

    def check(self) -> None:
        groups = Counter(state for name, state in self.states.items() if "." not in name)
        attempts = Counter(state for name, state in self.states.items() if "." in name)
        for mine, core in ((groups, self.core.group_counts), (attempts, self.core.attempt_counts)):
            stepped = core[State.STEPPED] + core[State.TRAINED]
            assert mine["stepped"] == stepped
            for state in (State.LIVE, State.STALE, State.FILTERED, State.FAILED, State.CANCELLED):
                assert mine[state.value] == core[state], f"{state}: {mine[state.value]} against {core[state]}"
        assert self.core.outstanding() <= self.rules.capacity
        running = sum(g.phase is Phase.RUNNING for g in self.core.groups.values())
        assert running <= self.rules.max_running
        may = self.core.outstanding() < self.rules.capacity and running < self.rules.max_running
        assert (self.core.blocked_by() is None) == may
        unpublished = sum(g.phase is Phase.UNPUBLISHED for g in self.core.groups.values())
        assert groups["live"] == self.core.outstanding() - unpublished
        for (group, slot), number in self.failures.items():
            assert number <= self.rules.max_attempts, f"{group}.{slot} failed {number} times"

    # -------------------------------------------------------------- events

    def run(self, events: int) -> None:
        for _ in range(events):
            self.event()
        self.check()

    def event(self) -> None:
        roll = self.rng.random()
        if roll < self.crash_rate:
            self.crash()
        elif roll < 0.25 and self.core.blocked_by() is None:
            self.start()
        elif roll < 0.85 and self.running:
            self.end(self.rng.choice(list(self.running)))
        elif self.ready and roll < 0.95:
            self.lease(self.ready.pop(self.rng.randrange(len(self.ready))))
        else:
            self.train()
        if self.rng.random() < 0.02:
            self.check()

    def start(self) -> None:
        ticket = self.core.next_ticket()
        group = self.core.start_group(ticket, f"task{ticket.index}")
        if group is None:
            return
        self.oldest[group.id] = self.core.version
        for slot in range(self.rules.group_size):
            self.running[self.core.start_attempt(group.id, slot)] = (group.id, slot)

    def end(self, attempt: str) -> None:
        group, slot = self.running.pop(attempt)
        outcome = Outcome.COMPLETED
        if self.rng.random() < self.failure_rate:
            outcome = self.rng.choice(FAILURES)
        if group in self.core.groups and not outcome.trainable and outcome is not Outcome.CANCELLED:
            self.failures[group, slot] += 1
        verdict = self.core.end_attempt(attempt, outcome)
        if group not in self.core.groups:
            return
        if verdict is Verdict.RETRY:
            self.running[self.core.start_attempt(group, slot)] = (group, slot)
        elif verdict is Verdict.READY:
            self.ready.append(group)

    def lease(self, group: str) -> None:
        if group not in self.core.groups:
            return
        self.core.lease(group, self.oldest[group])
        if self.rng.random() < self.reject_rate:
            self.core.filter_group(group)

    def train(self) -> None:
        cut = self.core.cut()
        if cut is None:
            return
        assert len(cut.groups) == self.rules.groups_per_batch
        self.step += 1
        self.core.step(cut, self.step)
        self._publish(cut)
        if self.rng.random() < 0.2:
            self.marker = Marker(len(self.book), self.core.version, self.step, self.core.progress())
            self.core.commit()

    def _publish(self, cut: Cut) -> None:
        if self.step % self.rules.publish_interval:
            return
        version = self.core.publishing(self.step)
        sampled = {name: self.oldest[name] for name in self.core.groups}
        for group in self.core.doomed(version, sampled):
            self.core.end_stale(group)
        self.core.publish(version)

    def crash(self) -> None:
        """Everything in memory is lost; a new epoch goes on from the marker and the book."""
        self.crashes += 1
        past = Past()
        for one in self.book:
            past.read(one)
        epoch = self.crashes + 1
        version = (self.published[-1] if self.published else 0) + 1
        past.abandon(self.marker.position)
        for name, state in list(self.states.items()):
            if state == "live":
                self.states[name] = "cancelled"
                items = past.attempts if "." in name else past.groups
                items[name] = "cancelled"
                kind = "attempt" if "." in name else "group"
                self.book.append(
                    {"kind": kind, "event": "ended", "id": name, "state": "cancelled", "seq": len(self.book)}  # type: ignore[typeddict-item]
                )
        self.core = Admission(self.rules, self.enter, epoch=epoch, version=version)
        self.published.append(version)
        self.core.group_counts += past.counts(past.groups, self.marker.position)
        self.core.attempt_counts += past.counts(past.attempts, self.marker.position)
        self.core.restore(self.marker.progress, [range(self.marker.version + 1, version)])
        self.step = self.marker.step
        self.running.clear()
        self.ready.clear()

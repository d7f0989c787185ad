"""A seeded simulation around the admission core: failing and slow agents, publishes, crashes, resumes.

After every event it checks the invariants of the ledger and of the staleness bound with records of its own.
`World.run(events)` raises AssertionError at the first violation.

A crash may occur between any two ledger entries, including those of a resume. After a crash, the ledger, the
newest marker and the trajectory files remain, and sometimes the gateway with the sealed groups.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tidegate.config import TrainerSettings
from tidegate.trainer.admission.rules import AttemptDecision, Rules
from tidegate.trainer.admission.state import Phase
from tidegate.trainer.checkpoint.checkpoint import Checkpoint
from tidegate.trainer.ledger.entries import LedgerEntry, State
from tidegate.trainer.ledger.state import LedgerState
from tidegate.trainer.resume import restore_admission
from tidegate.trainer.start import Start
from tidegate.turn import Turn, VersionSpan
from tidegate.types import Group, Outcome, Trajectory

SEALED = (Phase.READY, Phase.LEASED, Phase.SELECTED)

FAILURES = [
    Outcome.AGENT_ERROR, Outcome.TIMEOUT, Outcome.INFRA_ERROR, Outcome.REWARD_ERROR, Outcome.CANCELLED,
]  # fmt: skip


class Killed(Exception):
    """Raised to simulate a process that is killed right after a ledger entry."""


@dataclass
class Marker:
    """Content of a checkpoint; `published` is the number of versions published by then."""

    position: int
    step: int
    progress: dict[str, Any]
    published: int = 0

    def checkpoint(self) -> Checkpoint:
        return Checkpoint(Path(), self.step, {**self.progress, "ledger": self.position})


@dataclass
class World:
    rules: Rules
    rng: random.Random
    failure_rate: float = 0.1
    reject_rate: float = 0.3
    crash_rate: float = 0.0
    outage_rate: float = 0.0
    client_rate: float = 0.0
    """Share of events in which a client offers a group."""
    offered: dict[str, int] = field(default_factory=dict)
    """Number of episodes of each group that a client offered and admission accepted."""
    book: list[LedgerEntry] = field(default_factory=list)
    known: LedgerState = field(default_factory=LedgerState)
    """What the first `read` entries of the book say."""
    read: int = 0
    running: dict[str, tuple[str, int]] = field(default_factory=dict)
    waiting: list[tuple[str, int]] = field(default_factory=list)
    """Slots whose next attempt waits for the end of an outage."""
    paused: bool = False
    """Whether the run is paused according to the ledger."""
    issued_at: dict[str, int] = field(default_factory=dict)
    """Position in the book of each attempt's issue."""
    resumed_at: int = -1
    """Position of the end of the last outage."""
    charged: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Number of counted failures by (slot of a group, kind)."""
    quarantined: set[str] = field(default_factory=set)
    oldest: dict[str, int] = field(default_factory=dict)
    ready: list[str] = field(default_factory=list)
    unranked: set[str] = field(default_factory=set)
    """Groups to which a judge gave no verdict: the gateway never sealed them."""
    restored: set[str] = field(default_factory=set)
    """Groups that the last resume continued: the gateway has sealed them."""
    sealed: dict[str, list[str]] = field(default_factory=dict)
    """The attempts of each group that was ready, whose episodes the gateway has."""
    states: dict[str, str] = field(default_factory=dict)
    replaced: set[str] = field(default_factory=set)
    published: list[int] = field(default_factory=list)
    began: dict[int, int] = field(default_factory=dict)
    """Position of the marker from which a start began with a version."""
    step: int = 0
    crashes: int = 0
    newest: dict[str, int] = field(default_factory=dict)
    latest: dict[int, str] = field(default_factory=dict)
    """The newest group of each task, by task index."""
    files: set[str] = field(default_factory=set)
    """Groups in trajectory files, which are written before the ledger entry of their step."""
    parts: list[list[str]] = field(default_factory=list)
    """Minibatches of the next step that are already assembled."""
    trained: set[str] = field(default_factory=set)
    """Groups committed by a marker."""
    stepped: dict[str, int] = field(default_factory=dict)
    """Groups of the steps since the last marker, with their step."""
    put_back: set[str] = field(default_factory=set)
    """All groups that were ever put back."""
    lost_versions: set[int] = field(default_factory=set)
    fuse: int = 0
    """Entries until the process is killed; 0 if no kill is planned."""
    most: int = 0
    """Limit of groups in flight, which may exceed the capacity after a resume."""

    def __post_init__(self) -> None:
        self.marker: Marker | None = None
        parts = self.rng.randint(1, self.rules.groups_per_batch)
        settings = TrainerSettings(
            groups_per_batch=self.rules.groups_per_batch, minibatches=parts, streaming=parts > 1
        )
        self.part_sizes = settings.part_sizes
        self.core = restore_admission(Start(Path()), self.enter, self.rules, {}).admission

    # -------------------------------------------------------------- independent checks

    def enter(self, one: LedgerEntry) -> None:
        self.book.append({**one, "seq": len(self.book)})  # type: ignore[typeddict-item]
        if one["event"] == "publishing":
            assert not self.published or one["version"] > self.published[-1], "a version was used twice"
            self.published.append(one["version"])
        elif one["event"] == "issued":
            assert one["id"] not in self.states, f"{one['id']} was issued twice"
            self.states[one["id"]] = "live"
            self.issued_at[one["id"]] = len(self.book)
            if one["kind"] == "group":
                self._issue(one)
            if (old := one.get("replaces")) is not None:
                assert self.states[old] == "stale", f"{old} was replaced and is {self.states[old]}"
                assert old not in self.replaced, f"{old} was replaced twice"
                self.replaced.add(old)
        elif one["event"] == "ended":
            assert self.states[one["id"]] == "live", f"{one['id']} ended twice"
            self.states[one["id"]] = one["state"]
            if one["kind"] == "attempt":
                self._charge(one)
            if one["kind"] == "group" and one["state"] == "stepped":
                self._check_bound(one)
                assert one["id"] not in self.trained, f"{one['id']} contributes twice"
                self.stepped[one["id"]] = one["step"]
            elif one["kind"] == "group" and one["state"] == "stale":
                self._check_stale(one)
        elif one["event"] == "put_back":
            self._put_back(one["id"])
        elif one["event"] == "started":
            self.began[one["version"]] = one["position"] or 0
            self.published.append(one["version"])
            self.paused = False
        elif one["event"] == "lifted":
            self.quarantined.remove(one["task"])
        elif one["event"] == "quarantined":
            self._check_blame(one)
        elif one["event"] in ("paused", "resumed"):
            assert self.paused != (one["event"] == "paused")
            self.paused = not self.paused
            self.resumed_at = self.resumed_at if self.paused else len(self.book)
        if self.fuse:
            self.fuse -= 1
            if not self.fuse:
                raise Killed

    def _issue(self, one: LedgerEntry) -> None:
        """Checks that a task has one group at a time, and no new group once it was trained on."""
        if "client" in one:
            assert one["id"] in self.offered, f"{one['id']} was accepted twice, or never offered"
            return
        assert one["task"] not in self.quarantined, f"{one['task']} is quarantined"
        before = self.latest.get(one["index"])
        assert before is None or self.states[before] not in ("live", "stepped"), (
            f"{one['id']} does what {before} did"
        )
        self.latest[one["index"]] = one["id"]

    def _charge(self, one: LedgerEntry) -> None:
        """Counts a failure against the budget of its kind, unless an outage touched it.

        Of the attempts that an outage touched, only a probe that shows its end may be charged.
        """
        failed = one["state"] == "failed" and one["outcome"] not in ("completed", "truncated")
        if not (failed or one.get("lost")):
            return
        touched = self.paused or self.issued_at[one["id"]] < self.resumed_at
        if one.get("spared"):
            assert touched, f"{one['id']} was spared, and there was no outage"
        else:
            shows_the_end = one["id"] == self.core.outage.probe and one["outcome"] == Outcome.AGENT_ERROR
            assert not touched or shows_the_end, f"{one['id']} is charged for an outage"
            kind = "infra" if one["outcome"] in (Outcome.INFRA_ERROR, Outcome.CANCELLED) else "own"
            self.charged[one["id"].rpartition(".")[0], kind] += 1

    def _check_blame(self, one: LedgerEntry) -> None:
        """Checks that a task is quarantined only after `max_attempts` failures of its own."""
        assert one["outcome"] not in (Outcome.INFRA_ERROR, Outcome.CANCELLED), (
            f"{one['task']} is blamed for an outage"
        )
        own = [number for (slot, kind), number in self.charged.items()
               if kind == "own" and slot.startswith(f"{one['group']}.")]  # fmt: skip
        assert self.rules.max_attempts in own, f"{one['task']} was given up after {own} failures of its own"
        assert one["task"] not in self.quarantined
        self.quarantined.add(one["task"])

    def _put_back(self, group: str) -> None:
        assert group not in self.trained, f"{group} was committed and put back"
        members = [name for name in self.states if name == group or name.startswith(f"{group}.")]
        undone = [name for name in members if self.states[name] == "stepped"]
        assert undone, f"{group} was put back and was not stepped on"
        for name in undone:
            self.states[name] = "live"
        self.stepped.pop(group, None)
        self.put_back.add(group)

    def _check_bound(self, one: LedgerEntry) -> None:
        bound = self.rules.max_staleness
        truth = self.core.version - self.oldest[one["id"]]
        assert one["staleness"] == truth
        assert bound is None or truth <= bound, f"{one['id']} was trained at staleness {truth}"
        sampled = range(self.oldest[one["id"]], self.newest[one["id"]] + 1)
        assert not self.lost_versions.intersection(sampled), f"{one['id']} is of an abandoned lineage"
        members = [self.states[name] for name in self.sealed.get(one["id"], ())]
        assert members == ["stepped"] * len(members), (
            f"{one['id']} was trained with an attempt that had ended"
        )
        if one["id"] in self.offered:
            trained = [self.states[name] for name in self.states if name.startswith(f"{one['id']}.")]
            assert trained == ["stepped"] * self.offered[one["id"]], "an episode is not in the ledger"

    def _check_stale(self, one: LedgerEntry) -> None:
        """Checks that a stale group exceeds the bound, or has tokens of an abandoned lineage."""
        if one["oldest"] is None:
            return
        bound, sampled = self.rules.max_staleness, range(one["oldest"], (one["newest"] or one["oldest"]) + 1)
        assert one["oldest"] == self.oldest[one["id"]]
        assert one["staleness"] == one["version"] - one["oldest"]
        assert (bound is not None and one["staleness"] > bound) or self.lost_versions.intersection(sampled)

    def check(self) -> None:
        groups = Counter(state for name, state in self.states.items() if "." not in name)
        attempts = Counter(state for name, state in self.states.items() if "." in name)
        for mine, core in ((groups, self.core.group_counts), (attempts, self.core.attempt_counts)):
            stepped = core[State.STEPPED] + core[State.TRAINED]
            assert mine["stepped"] == stepped
            for state in (State.LIVE, State.STALE, State.FILTERED, State.FAILED, State.CANCELLED):
                assert mine[state.value] == core[state], f"{state}: {mine[state.value]} against {core[state]}"
        self.most = min(self.most, len(self.core.groups))
        assert len(self.core.groups) <= max(self.rules.capacity, self.most)
        places = [*self.running.values(), *self.waiting]
        running = len({place for place in places if place[0] in self.core.groups})
        assert running == self.core._in_flight.unsettled
        size, most = self.rules.group_size, self.rules.max_running
        assert running <= max(most, size)
        room = not running or running + size <= most
        free = not self.paused or (self.core.outage.down is None and not running)
        may = len(self.core.groups) < self.rules.capacity and room and free
        assert self.paused == (self.core.outage.why is not None)
        self._check_liveness(running)
        assert (self.core.blocked_by() is None) == may
        unpublished = sum(g.phase is Phase.UNPUBLISHED for g in self.core.groups.values())
        assert groups["live"] == len(self.core.groups) - unpublished
        limits = {"own": self.rules.max_attempts, "infra": self.rules.max_infra_attempts}
        for (slot, kind), number in self.charged.items():
            assert number <= limits[kind], f"{slot} failed {number} times"
        assert +self.core.failures.causes == self._past().failures()

    def _check_liveness(self, running: int) -> None:
        """Checks that unsettled slots always include one that runs or may start, except during an outage."""
        if self.core.outage.down is None and running:
            live = any(place[0] in self.core.groups for place in self.running.values())
            assert live or self.core.outage.may_attempt()

    def _check_filtered(self) -> None:
        """Checks that the counts of filtered groups are those that the ledger alone gives."""
        ended = [group for group in self._past().groups.values() if group.state is State.FILTERED]
        alike = {
            "solved": sum(group.end.get("solved") == group.end.get("episodes", 0) for group in ended),
            "failed": sum(group.end.get("solved") == 0 for group in ended),
            "cut": 0,
        }
        assert self.core.filtered_alike == Counter(alike)

    # -------------------------------------------------------------- events

    def run(self, events: int) -> None:
        for _ in range(events):
            self.event()
        self.check()
        self._check_filtered()

    def event(self) -> None:
        if not self.fuse and self.rng.random() < self.crash_rate:
            self.fuse = self.rng.randint(1, 20)
        try:
            self._event()
        except Killed:
            self.crash()

    def _event(self) -> None:
        if self.rng.random() < self.outage_rate or (self.core.outage.down and self.rng.random() < 0.1):
            self.core.outage.set_down(None if self.core.outage.down else "no engine")
        self.attempt_waiting()
        if self.core.failures.quarantined and self.rng.random() < 0.02:
            assert self.core.failures.lift(self.rng.choice(sorted(self.core.failures.quarantined)))
        if self.rng.random() < self.client_rate and len(self.core.groups) < self.rules.capacity:
            self.offer()
            return
        roll = self.rng.random()
        if roll < 0.25 and self.core.blocked_by() is None:
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
        ticket = self.core.cursor.next()
        group = self.core.start_group(ticket, f"task{ticket.index}")
        if group is None:
            return
        self.oldest[group.id] = self.core.version
        for slot in range(self.rules.group_size):
            self.attempt(group.id, slot)

    def reward(self, group: str, slot: int) -> float:
        return random.Random(f"{group}/{slot}").choice((0.0, 1.0))

    def offer(self) -> None:
        """A client offers a group, of any size and age."""
        name, number = f"c{len(self.book)}", self.rng.randint(0, self.rules.group_size + 1)
        self.newest[name] = self.rng.randint(0, self.core.version)
        self.oldest[name] = max(0, self.newest[name] - self.rng.randint(0, 2))
        age = self.core.version - self.oldest[name]
        sampled = range(self.oldest[name], self.newest[name] + 1)
        bound, least = self.rules.max_staleness, self.rules.min_group_size
        fresh = (bound is None or age <= bound) and not self.core.versions.abandoned.intersection(sampled)
        if fits := fresh and least <= number <= self.rules.group_size:
            self.offered[name] = number
        entries = len(self.book)
        group = self._group(name, range(number))
        for trajectory in group.trajectories:
            trajectory.client = "a client"
        refusal = self.core.accept(group)
        assert (refusal is None) == fits, refusal
        assert fits or len(self.book) == entries, "a refused group is in the ledger"

    def attempt(self, group: str, slot: int) -> None:
        """Starts a slot's next attempt, or queues it until the outage is over."""
        if self.core.outage.may_attempt():
            self.running[self.core.start_attempt(group, slot)] = (group, slot)
        else:
            self.waiting.append((group, slot))

    def attempt_waiting(self) -> None:
        waiting, self.waiting = self.waiting, []
        for group, slot in waiting:
            if group in self.core.groups:
                self.attempt(group, slot)

    def end(self, attempt: str) -> None:
        group, slot = self.running.pop(attempt)
        outcome = Outcome.COMPLETED
        if self.rng.random() < self.failure_rate:
            outcome = self.rng.choice(FAILURES)
        self.newest[group] = self.core.version
        decision = self.core.end_attempt(attempt, outcome)
        if group not in self.core.groups:
            return
        if decision is AttemptDecision.RETRY:
            self.attempt(group, slot)
        elif decision is AttemptDecision.READY:
            self.ready.append(group)
            self.sealed[group] = self.core.groups[group].successful_attempts()

    def lease(self, group: str) -> None:
        if group not in self.core.groups:
            return
        slots = self.core.groups[group].slots
        solved = sum(self.reward(group, number) for number, slot in enumerate(slots) if slot.done is not None)
        self.core.lease(group, self.oldest[group], self.newest[group], int(solved))
        if self.rng.random() < self.reject_rate:
            self.core.filter_group(group)

    def train(self) -> None:
        size = self.part_sizes[len(self.parts)]
        self.core.end_stale_groups()
        part = self.core.select_batch(size)
        if part is None:
            return
        assert len(part) == size
        self.parts.append(part)
        if len(self.parts) < len(self.part_sizes):
            return  # streaming: the other minibatches are assembled when their groups are ready
        batch, self.parts = [group for part in self.parts for group in part], []
        assert len(batch) == self.rules.groups_per_batch
        self.step += 1
        self.files.update(batch)
        self.core.step(batch, self.step)
        self._publish(batch)
        if self.rng.random() < 0.2:
            self._commit()

    def _commit(self) -> None:
        sizes = Counter(self.stepped.values())
        assert set(sizes.values()) <= {self.rules.groups_per_batch}, "a step took another number of groups"
        assert sorted(sizes) == list(range((self.marker.step if self.marker else 0) + 1, self.step + 1))
        self.marker = Marker(len(self.book), self.step, self.core.progress(), len(self.published))
        self.core.commit()
        self.trained.update(self.stepped)
        self.stepped.clear()

    def _publish(self, batch: list[str]) -> None:
        if self.step % self.rules.publish_interval:
            return
        version = self.core.versions.reserve(self.step)
        sampled = {name: self.oldest[name] for name in self.core.groups}
        for group in self.core.will_be_stale(version, sampled):
            self.core.end_stale(group, version, sampled[group])
        self.core.mark_live(version)

    def crash(self) -> None:
        """Drops all state in memory; a new epoch resumes from the marker and the ledger."""
        sealed = {name for name, group in self.core.groups.items() if group.phase in SEALED} - self.unranked
        if self.rng.random() < 0.5:
            sealed = set()
        while True:
            self.crashes += 1
            try:
                self._resume(sealed)
            except Killed:
                continue
            break
        assert not self.stepped, "what was stepped on behind the marker is put back"
        self.most = len(self.core.groups)
        self.running.clear()
        self.waiting.clear()
        phases = {name: group.phase for name, group in self.core.groups.items()}
        self.ready = [name for name, phase in phases.items() if phase is Phase.READY]
        assert set(phases.values()) <= {Phase.READY, Phase.LEASED}
        self.restored = set(phases)
        self._check_filtered()

    def _past(self) -> LedgerState:
        """What the book says; a resume, which discards entries, reads it anew."""
        for one in self.book[self.read :]:
            self.known.apply(one)
        self.read = len(self.book)
        return self.known

    def _resume(self, sealed: set[str]) -> None:
        past = LedgerState()
        for one in self.book:
            past.apply(one)
        marker = self.marker
        position = marker.position if marker else 0
        later = self.published[marker.published if marker else 1 :]
        self.lost_versions |= {version for version in later if self.began.get(version) != position}
        checkpoint = marker.checkpoint() if marker else None
        start = Start(Path(), marker.step if marker else 0, past.highest_version + 1, past, checkpoint)
        past.discard_after(start.position)
        kept = {name: self._tokens(past, name) for name in start.open_groups() & self.files}
        for name in list(kept):
            if self.rng.random() < 0.02:
                del kept[name]
        self.step = start.step
        self.parts.clear()
        # Opening writes entries, which are checked against this version.
        self.core.versions.live = start.version
        resumed = restore_admission(start, self.enter, self.rules, kept, sealed)
        self.core = resumed.admission
        for group in resumed.leased:
            assert self.core.groups[group.id].solved == group.solved()

    def _tokens(self, past: LedgerState, name: str) -> Group:
        """The group as the trajectory file holds it."""
        if name in self.offered:
            return self._group(name, range(self.offered[name]))
        return self._group(name, [past.attempts[one].issued["slot"] for one in self.sealed[name]])

    def _group(self, name: str, slots: Iterable[int]) -> Group:
        spans = (VersionSpan(self.oldest[name], 0, 1), VersionSpan(self.newest[name], 1, 2))
        ids = np.zeros(2, np.int32)
        turn = Turn(0, None, ids, ids, np.zeros(2, np.float32), spans, "stop", 1.0)
        members = [
            Trajectory(
                f"{name}-{slot}", "t", "e", "train", Outcome.COMPLETED, [turn], group_id=name, slot=slot
            )
            for slot in slots
        ]
        for trajectory in members:
            trajectory.reward = self.reward(name, trajectory.slot or 0)
        return Group(name, "t", members)

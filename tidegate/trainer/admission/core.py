"""The admission core: which group may start, what a failure means, what a batch may hold.

It has no clock, does no I/O and knows nothing of torch: events go in, decisions come out, and every
issue and ending is handed to `book`. The loop, the simulator and the tests drive this same object.

    issue → start_attempt → end_attempt … → ready → lease → cut → step → publish

**Start gate.** A group may start iff outstanding groups < (max_staleness + 1) · groups_per_batch ·
publish_interval. Outstanding are the running, ready and leased ones, and those stepped on since the last
publish: what was stepped on makes room only when the version it made is live. So with staleness 0 the
run is exactly synchronous. What ends as stale, filtered or failed makes room at once. Towards the end of
the run no group starts that no step is left for, and none while a version is being published: it would
begin on the weights before it, and be stale a version sooner.

**Hard bound.** `cut` sweeps by *oldest sampled version* at the moment of the batch. The gate only keeps
waste low; the bound never rests on it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping

from tidegate.errors import LedgerError
from tidegate.trainer.admission.outage import Outage
from tidegate.trainer.admission.rules import AttemptVerdict, Rules
from tidegate.trainer.admission.state import (
    AdmissionProgress,
    BatchSelection,
    GroupState,
    Phase,
    Slot,
    TaskSlot,
)
from tidegate.trainer.ledger.entries import LedgerEntry, State, entry
from tidegate.types import Outcome


class Admission:
    """See the module. `book` receives every entry, in order; `epoch` keeps ids unique across restarts."""

    def __init__(
        self,
        rules: Rules,
        book: Callable[[LedgerEntry], None],
        *,
        epoch: int = 1,
        version: int = 0,
        step: int = 0,
    ) -> None:
        self.rules = rules
        self.version = version
        self.step_done = step
        self.epoch = epoch
        self.abandoned: set[int] = set()
        """Versions of lineages that a resume left behind; their tokens are not admissible."""
        self.groups: dict[str, GroupState] = {}
        self.quarantined: set[str] = set()
        self.group_counts: Counter[State] = Counter()
        self.attempt_counts: Counter[State] = Counter()
        self.failed_in_a_row = 0
        self.filtered_in_a_row = 0
        """Since the last step."""
        self.outage = Outage(book)
        self._book = book
        self._cursor = 0
        self._recycled: deque[TaskSlot] = deque()
        self._announced = version
        self._number = 0
        self._running = 0
        self._of_attempt: dict[str, tuple[str, int]] = {}
        self._ready_order: deque[str] = deque()

    # ------------------------------------------------------------------ starting

    def outstanding(self) -> int:
        return len(self.groups)

    def running(self) -> int:
        """Episodes that run, or that are about to be attempted again."""
        return self._running

    def blocked_by(self) -> str | None:
        """Why no group may start now, in words; None if one may."""
        if (out := self.outage.why) is not None and (self.outage.down or self._running):
            return f"an outage pauses the run: {out}"
        if self._announced > self.version:
            return f"version {self._announced} is being published"
        if self.outstanding() >= self.rules.capacity:
            return f"{self.outstanding()} groups are outstanding, the staleness bound's capacity"
        if self.running() and self.running() + self.rules.group_size > self.rules.max_running:
            return f"{self.running()} episodes are running; the concurrency limit leaves no place for a group"
        if (needed := self._needed()) is not None and needed <= 0:
            return "the steps that are left have all the groups they need"
        return None

    def _needed(self) -> int | None:
        """How many groups more the run's last steps take; None where that is unknown."""
        if self.rules.steps is None:
            return None
        to_be_trained = sum(group.phase is not Phase.UNPUBLISHED for group in self.groups.values())
        return (self.rules.steps - self.step_done) * self.rules.groups_per_batch - to_be_trained

    def next_ticket(self) -> TaskSlot:
        """The next task's place: recycled ones first."""
        if self._recycled:
            return self._recycled.popleft()
        return self._fresh_ticket()

    def _fresh_ticket(self) -> TaskSlot:
        self._cursor += 1
        return TaskSlot(self._cursor - 1)

    def start_group(self, ticket: TaskSlot, task: str) -> GroupState | None:
        """Issue a group; None if the task is quarantined, whose ticket is then spent."""
        if task in self.quarantined:
            return None
        if (blocked := self.blocked_by()) is not None:
            raise LedgerError(f"group for task {task} started against the gate: {blocked}")
        self._number += 1
        group = GroupState(
            f"g{self.epoch}-{self._number:06d}", task, ticket, [Slot() for _ in range(self.rules.group_size)]
        )
        self.groups[group.id] = group
        self._running += len(group.slots)
        self.group_counts[State.LIVE] += 1
        self._book(
            entry(
                "group", "issued", id=group.id, task=task, index=ticket.index,
                version=self.version, replaces=ticket.replaces,
            )
        )  # fmt: skip
        return group

    def start_attempt(self, group_id: str, slot: int) -> str:
        """Issue a slot attempt and return its id."""
        place = self.groups[group_id].slots[slot]
        if place.running is not None or place.settled(self.rules):
            raise LedgerError(f"group {group_id} slot {slot} is running or settled; it cannot start again")
        if not self.outage.may_attempt():
            raise LedgerError(f"group {group_id} slot {slot} started in an outage: {self.outage.why}")
        place.issued += 1
        place.running = f"{group_id}.{slot}.{place.issued}"
        self._of_attempt[place.running] = (group_id, slot)
        self.outage.started(place.running)
        self.attempt_counts[State.LIVE] += 1
        self._book(
            entry("attempt", "issued", id=place.running, group=group_id, slot=slot, number=place.issued)
        )
        return place.running

    # ------------------------------------------------------------------ ending

    def end_attempt(self, attempt: str, outcome: Outcome, why: str | None = None) -> AttemptVerdict:
        """An agent's run ended. A trainable one stands for its slot until the group ends."""
        where = self._of_attempt.get(attempt)
        if where is None:
            return AttemptVerdict.LATE
        group = self.groups[where[0]]
        slot = group.slots[where[1]]
        slot.running = None
        if outcome is Outcome.CANCELLED:
            self._end_attempt(attempt, State.CANCELLED, outcome, why)
            return AttemptVerdict.RETRY
        if outcome.trainable:
            slot.done = attempt
            slot.outcome = outcome
            self.outage.ended(attempt, outcome, why)
        else:
            self._fail(slot, attempt, outcome, why)
            if not slot.settled(self.rules):
                return AttemptVerdict.RETRY
            if slot.failures >= self.rules.max_attempts:
                self._quarantine(group, outcome, why)
        self._running -= 1
        return self._settle(group)

    def _fail(self, slot: Slot, attempt: str, outcome: Outcome, why: str | None) -> None:
        """A failure is charged to the slot's budget for its kind; one in an outage to none."""
        if self.outage.spares(attempt, outcome):
            self._end_attempt(attempt, State.FAILED, outcome, why, spared=True)
        else:
            slot.mishaps += outcome is Outcome.INFRA_ERROR
            slot.failures += outcome is not Outcome.INFRA_ERROR
            self._end_attempt(attempt, State.FAILED, outcome, why)
        self.outage.ended(attempt, outcome, why)

    def _settle(self, group: GroupState) -> AttemptVerdict:
        rules = self.rules
        lost = sum(slot.done is None and slot.settled(rules) for slot in group.slots)
        if len(group.slots) - lost < self.rules.min_group_size:
            self.failed_in_a_row += 1
            self._end_group(group, State.FAILED)
            return AttemptVerdict.FAILED
        if not all(slot.settled(rules) for slot in group.slots):
            return AttemptVerdict.WAIT
        group.phase = Phase.READY
        self.failed_in_a_row = 0
        return AttemptVerdict.READY

    def _quarantine(self, group: GroupState, outcome: Outcome, why: str | None) -> None:
        if group.task not in self.quarantined:
            self.quarantined.add(group.task)
            self._book(
                entry("run", "quarantined", task=group.task, group=group.id, outcome=outcome.value, why=why)
            )

    def hopeless(self) -> str | None:
        """Why nothing can be expected to be learned any more, in words; None while there is hope."""
        if self.failed_in_a_row >= max(8, self.rules.capacity):
            return f"the last {self.failed_in_a_row} groups all failed"
        if self.filtered_in_a_row >= max(256, 32 * self.rules.groups_per_batch):
            return (
                f"{self.filtered_in_a_row} groups were filtered since the last step: their rewards are all "
                "alike (tasks all solved, or all too hard), or their episodes were all cut short and masked"
            )
        return None

    def gives_up(self, attempt: str, outcome: Outcome) -> bool:
        """Whether an attempt that ends so is the one for which its task is quarantined."""
        blameless = outcome.trainable or outcome in (Outcome.CANCELLED, Outcome.INFRA_ERROR)
        if blameless or attempt not in self._of_attempt or self.outage.spares(attempt, outcome):
            return False
        group_id, slot = self._of_attempt[attempt]
        group = self.groups[group_id]
        last = group.slots[slot].failures + 1 >= self.rules.max_attempts
        return last and group.task not in self.quarantined

    def cancel_group(self, group_id: str) -> None:
        """The run is stopping: the group ends `cancelled`, and its task is issued again if it goes on."""
        ticket = self.groups[group_id].ticket
        self._end_group(self.groups[group_id], State.CANCELLED)
        self._recycled.append(TaskSlot(ticket.index, None, ticket.stale_retries))

    # ------------------------------------------------------------------ consuming

    def lease(self, group_id: str, oldest: int | None, newest: int | None = None) -> None:
        """The trainer holds the group now; `oldest` and `newest` (None: the same) are among its tokens'
        versions."""
        group = self.groups[group_id]
        if group.phase is not Phase.READY:
            raise LedgerError(f"group {group_id} is {group.phase}, not ready; it cannot be leased")
        group.phase = Phase.LEASED
        group.oldest, group.newest = oldest, newest
        self._ready_order.append(group_id)

    def filter_group(self, group_id: str) -> None:
        """The group can teach nothing (rewards alike, or a loss that is not finite): it makes room."""
        self.filtered_in_a_row += 1
        self._end_group(self.groups[group_id], State.FILTERED)

    def staleness(self, oldest: int | None) -> int | None:
        """Versions between the trainer and the oldest token; None where it is unknown."""
        return None if oldest is None or oldest > self.version else self.version - oldest

    def admissible(self, oldest: int | None, newest: int | None = None) -> bool:
        """Whether tokens of these versions, and of any between them, may be trained on now."""
        staleness = self.staleness(oldest)
        bound = self.rules.max_staleness
        if oldest is None or staleness is None or (bound is not None and staleness > bound):
            return False
        last = oldest if newest is None else newest
        return not any(oldest <= version <= last for version in self.abandoned)

    def sweep(self) -> list[str]:
        """End every leased group that is too stale now; returns their ids."""
        held = [self.groups[group_id] for group_id in self._ready_order]
        gone = [group.id for group in held if not self.admissible(group.oldest, group.newest)]
        for group_id in gone:
            self.end_stale(group_id)
        return gone

    def cut(self, number: int | None = None) -> BatchSelection | None:
        """The next batch, or minibatch of `number` groups: exactly so many swept groups, in order of
        completion; None where there are not enough."""
        self.sweep()
        size = self.rules.groups_per_batch if number is None else number
        if len(self._ready_order) < size:
            return None
        chosen = [self._ready_order.popleft() for _ in range(size)]
        staleness = []
        for group_id in chosen:
            group = self.groups[group_id]
            group.phase = Phase.CUT
            age = self.staleness(group.oldest)
            assert age is not None
            staleness.append(age)
        return BatchSelection(self.version, chosen, staleness)

    def step(self, cut: BatchSelection, step: int) -> None:
        """The optimiser stepped on the batch; its groups make room at the next publish."""
        self.step_done = step
        self.filtered_in_a_row = 0
        for group_id, age in zip(cut.groups, cut.staleness, strict=True):
            group = self.groups[group_id]
            group.phase = Phase.UNPUBLISHED
            self._enter_end(
                group, State.STEPPED, step=step, version=cut.version, oldest=group.oldest, staleness=age
            )
            if not self.rules.publishes:
                del self.groups[group_id]

    # ------------------------------------------------------------------ publishing

    def doomed(self, version: int, oldest: Mapping[str, int | None]) -> list[str]:
        """Groups not yet leased that can never be admitted once `version` is live.

        `oldest` is the oldest version sampled so far in each, None where nothing was sampled.
        """
        bound = self.rules.max_staleness
        if bound is None:
            return []
        waiting = (Phase.RUNNING, Phase.READY)
        return [
            group_id
            for group_id, sampled in oldest.items()
            if sampled is not None
            and version - sampled > bound
            and group_id in self.groups
            and self.groups[group_id].phase in waiting
        ]

    def end_stale(self, group_id: str, version: int | None = None, oldest: int | None = None) -> None:
        """The group is too stale: it ends, and its task is issued again while the budget lasts.

        `version` is the one that makes it so where it is about to be published, with the `oldest` version
        sampled so far; of a leased group both are known.
        """
        group = self.groups[group_id]
        version = self.version if version is None else version
        oldest = group.oldest if oldest is None else oldest
        age = None if oldest is None else version - oldest
        self._end_group(
            group, State.STALE, version=version, oldest=oldest, newest=group.newest, staleness=age
        )
        if group.ticket.stale_retries < self.rules.max_stale_retries:
            self._recycled.append(TaskSlot(group.ticket.index, group.id, group.ticket.stale_retries + 1))

    def publishing(self, step: int) -> int:
        """Take the next version's number for the weights after `step`.

        It is entered before any engine hears of it, so that no restart can give it to other weights.
        """
        self._announced += 1
        self._book(entry("run", "publishing", version=self._announced, step=step))
        return self._announced

    def publish(self, version: int) -> None:
        """`version` is live on the engines: the trainer's version from now on."""
        if not self.version < version <= self._announced:
            raise LedgerError(
                f"version {version} cannot go live after {self.version}; {self._announced} was announced"
            )
        self.version = version
        for group_id in [g.id for g in self.groups.values() if g.phase is Phase.UNPUBLISHED]:
            del self.groups[group_id]

    def commit(self) -> None:
        """A checkpoint's marker was written: what was stepped is trained."""
        for counts in (self.group_counts, self.attempt_counts):
            counts[State.TRAINED] += counts.pop(State.STEPPED, 0)

    # ------------------------------------------------------------------ resuming

    def progress(self) -> AdmissionProgress:
        """The tasks to go on with: the cursor, and what is outstanding or waits to be recycled."""
        unpublished = Phase.UNPUBLISHED
        open_tickets = [group.ticket for group in self.groups.values() if group.phase is not unpublished]
        return AdmissionProgress(self._cursor, [*self._recycled, *open_tickets])

    def restore(self, progress: AdmissionProgress) -> None:
        """Go on where a checkpoint left off. Tickets lose `replaces`: it named groups of a past epoch."""
        self._cursor = progress.cursor
        self._recycled = deque(
            TaskSlot(ticket.index, None, ticket.stale_retries) for ticket in progress.tickets
        )

    def go_on(self, group: GroupState) -> None:
        """Take up a group of a past epoch, which is ready, or leased where the trainer has its tokens.

        Its task is not issued again, unless the group turns out to be stale.
        """
        self.groups[group.id] = group
        if group.phase is Phase.LEASED:
            self._ready_order.append(group.id)
        for number, slot in enumerate(group.slots):
            if slot.done is not None:
                self._of_attempt[slot.done] = (group.id, number)
        while self._cursor <= group.ticket.index:
            self._recycled.append(self._fresh_ticket())
        self._recycled = deque(one for one in self._recycled if one.index != group.ticket.index)

    # ------------------------------------------------------------------ the book

    def _end_group(self, group: GroupState, state: State, **details: object) -> None:
        self._enter_end(group, state, **details)
        del self.groups[group.id]
        if group.phase is Phase.RUNNING:
            self._running -= sum(not slot.settled(self.rules) for slot in group.slots)
        elif group.phase is Phase.LEASED:
            self._ready_order.remove(group.id)

    def _enter_end(self, group: GroupState, state: State, **details: object) -> None:
        """Attempts first, so that no attempt is ever live in an ended group."""
        for slot in group.slots:
            if slot.done is not None:
                self._end_attempt(slot.done, state, slot.outcome or Outcome.COMPLETED, None)
            if slot.running is not None:
                self._end_attempt(slot.running, State.CANCELLED, Outcome.CANCELLED, f"group {state}")
        self.group_counts[State.LIVE] -= 1
        self.group_counts[state] += 1
        self._book(entry("group", "ended", id=group.id, state=state.value, **details))

    def _end_attempt(
        self, attempt: str, state: State, outcome: Outcome, why: str | None, **details: object
    ) -> None:
        if state is State.CANCELLED:
            self.outage.forget(attempt)
        del self._of_attempt[attempt]
        self.attempt_counts[State.LIVE] -= 1
        self.attempt_counts[state] += 1
        self._book(
            entry(
                "attempt", "ended", id=attempt, state=state.value, outcome=outcome.value, why=why, **details
            )
        )  # fmt: skip

"""Admission core: decides which groups may start, how failures count, and what a batch contains.

It has no clock, does no I/O and does not import torch. Events go in, decisions come out, and every issue
and ending is passed to `record`. The training loop, the simulator and the tests use this same object.

    start_group → start_attempt → end_attempt … → lease → select_batch → step → publish

A group that a client formed enters by `accept`, as a leased one, or is refused.

**Start rule.** A group may start if and only if outstanding groups < (max_staleness + 1) · groups_per_batch ·
publish_interval. Outstanding groups are running, ready, leased, or trained on since the last publish: a
trained group makes room only when the resulting version is live. With staleness 0 the run is therefore
exactly synchronous. Groups that end stale, filtered or failed make room at once. Near the end of the run
no group starts beyond what the remaining steps need. No group starts during a publish: it would sample
from the previous weights and become stale one version sooner.

**Hard bound.** `select_batch` drops groups by *oldest sampled version* when the batch is assembled. The gate
only reduces waste; the bound does not depend on it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping

from tidegate.errors import LedgerError
from tidegate.trainer.admission.clients import choose, refusal
from tidegate.trainer.admission.curriculum import Curriculum
from tidegate.trainer.admission.outage import Outage
from tidegate.trainer.admission.rules import AttemptVerdict, Rules
from tidegate.trainer.admission.state import (
    AdmissionProgress,
    BatchSelection,
    GroupState,
    Phase,
    Slot,
    TaskTicket,
)
from tidegate.trainer.ledger.entries import LedgerEntry, State, entry, failure_cause
from tidegate.trainer.ledger.state import LedgerItem
from tidegate.types import Group, Outcome, Task


class Admission:
    """Admission state of one run.

    Args:
        rules: Limits to enforce.
        record: Receives every ledger entry, in order.
        epoch: Number of the trainer's start; makes group ids unique across restarts.
        version: Policy version that is live.
        step: Steps taken.
    """

    def __init__(
        self,
        rules: Rules,
        record: Callable[[LedgerEntry], None],
        *,
        epoch: int = 1,
        version: int = 0,
        step: int = 0,
    ) -> None:
        self.rules = rules
        self.version = version
        self.steps_done = step
        self.epoch = epoch
        self.abandoned: set[int] = set()
        """Versions whose tokens are not trained on: rolled back, or published after a checkpoint that a later
        start resumed from."""
        self.groups: dict[str, GroupState] = {}
        self.quarantined: set[str] = set()
        self.group_counts: Counter[State] = Counter()
        self.attempt_counts: Counter[State] = Counter()
        self.failures: Counter[str] = Counter()
        """Failed attempts by cause (`failure_cause`)."""
        self.failed_in_a_row = 0
        self.unranked_in_a_row = 0
        """Groups whose ranking failed since one was sealed."""
        self.filtered_in_a_row = 0
        """Since the last step."""
        self.filtered_alike: Counter[str] = Counter()
        """Groups that ended `filtered` with all episodes solved ("solved"), or none ("failed")."""
        self.curriculum = Curriculum(rules.floor, rules.group_size, rules.seed, step)
        self.outage = Outage(record)
        self._record = record
        self._cursor = 0
        self._recycled: deque[TaskTicket] = deque()
        self._reserved = version
        self._publishing = False
        self._number = 0
        self._running = 0
        self._attempts: dict[str, tuple[str, int]] = {}
        self._leased_order: deque[str] = deque()

    # ------------------------------------------------------------------ starting

    def outstanding(self) -> int:
        return len(self.groups)

    def running(self) -> int:
        """Number of unsettled slots: episodes that run or will be attempted again."""
        return self._running

    def blocked_by(self) -> str | None:
        """Reason why no group may start now; None if one may start."""
        if (outage := self.outage.why) is not None and (self.outage.down or self._running):
            return f"an outage pauses the run: {outage}"
        if self._publishing:
            return f"version {self._reserved} is being published"
        if self.outstanding() >= self.rules.capacity:
            return f"{self.outstanding()} groups are outstanding, which is the staleness bound's capacity"
        if self.running() and self.running() + self.rules.group_size > self.rules.max_running:
            return f"{self.running()} episodes are running; another group would exceed the concurrency limit"
        if (needed := self._needed()) is not None and needed <= 0:
            return "the remaining steps have all the groups they need"
        return None

    def _needed(self) -> int | None:
        """Number of further groups that the remaining steps need; None if unknown."""
        if self.rules.steps is None:
            return None
        to_train = sum(group.phase is not Phase.UNPUBLISHED for group in self.groups.values())
        return (self.rules.steps - self.steps_done) * self.rules.groups_per_batch - to_train

    def next_ticket(self, task_at: Callable[[int], Task] | None = None) -> TaskTicket:
        """Return the ticket of the next task: recycled ones first, then new ones.

        Args:
            task_at: Index → training task; None: no task is passed over by the curriculum.
        """
        if self._recycled:
            return self._recycled.popleft()
        if task_at is not None and self.rules.floor < 1:
            while not self.curriculum.accepts(self._cursor, task_at(self._cursor)):
                self._cursor += 1
        return self._new_ticket()

    def _new_ticket(self) -> TaskTicket:
        self._cursor += 1
        return TaskTicket(self._cursor - 1)

    def start_group(self, ticket: TaskTicket, task: str, task_kind: str = "") -> GroupState | None:
        """Issue a group. Returns None, and uses up the ticket, if the task is quarantined."""
        if task in self.quarantined:
            return None
        if (blocked := self.blocked_by()) is not None:
            raise LedgerError(f"cannot start a group for task {task}: {blocked}")
        self._number += 1
        slots = [Slot() for _ in range(self.rules.group_size)]
        group = GroupState(f"g{self.epoch}-{self._number:06d}", task, ticket, slots, task_kind=task_kind)
        self.groups[group.id] = group
        self._running += len(slots)
        self.group_counts[State.LIVE] += 1
        self._record(
            entry(
                "group", "issued", id=group.id, task=task, index=ticket.index,
                version=self.version, replaces=ticket.replaces, task_kind=task_kind,
            )
        )  # fmt: skip
        return group

    def start_attempt(self, group_id: str, slot: int) -> str:
        """Issue an attempt for a slot and return its id."""
        state = self.groups[group_id].slots[slot]
        if state.running is not None or state.settled(self.rules):
            raise LedgerError(f"cannot start group {group_id} slot {slot}: it is running or settled")
        if not self.outage.may_attempt():
            raise LedgerError(f"cannot start group {group_id} slot {slot} in an outage: {self.outage.why}")
        state.issued += 1
        attempt = state.running = f"{group_id}.{slot}.{state.issued}"
        self._attempts[attempt] = (group_id, slot)
        self.outage.started(attempt)
        self.attempt_counts[State.LIVE] += 1
        self._record(entry("attempt", "issued", id=attempt, group=group_id, slot=slot, number=state.issued))
        return attempt

    # ------------------------------------------------------------------ ending

    def end_attempt(self, attempt: str, outcome: Outcome, why: str | None = None) -> AttemptVerdict:
        """Record that an episode ended. A trainable one holds its slot until the group ends."""
        if attempt not in self._attempts:
            return AttemptVerdict.LATE
        group_id, number = self._attempts[attempt]
        group = self.groups[group_id]
        slot = group.slots[number]
        slot.running = None
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
        """Charge a failure to the slot's budget for its kind, or to none in an outage.

        `cancelled` is a failure here: the process that ran the agent exited.
        """
        details = {"lost": True} if outcome is Outcome.CANCELLED else {}
        if self.outage.leaves_uncharged(attempt, outcome):
            details["spared"] = True
        else:
            slot.infra_failures += outcome.blameless
            slot.failures += not outcome.blameless
        self.failures[failure_cause(outcome, spared="spared" in details)] += 1
        state = State.CANCELLED if outcome is Outcome.CANCELLED else State.FAILED
        self._end_attempt(attempt, state, outcome, why, **details)
        if outcome is not Outcome.CANCELLED:
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
            self._record(
                entry("run", "quarantined", task=group.task, group=group.id, outcome=outcome.value, why=why)
            )

    def lift(self, task: str) -> bool:
        """Issue a quarantined task again when its turn comes; returns whether it was quarantined."""
        if task not in self.quarantined:
            return False
        self.quarantined.remove(task)
        self._record(entry("run", "lifted", task=task))
        return True

    def fail_group(self, group_id: str, outcome: Outcome, why: str) -> None:
        """End a group, all of whose slots are settled, as `failed`: its episodes have no reward after all."""
        group = self.groups[group_id]
        for slot in group.slots:
            if slot.done is not None:
                spared = self.outage.touched(slot.done)
                self.failures[failure_cause(outcome, spared=spared)] += 1
                details = {"spared": True} if spared else {}
                self._end_attempt(slot.done, State.FAILED, outcome, why, **details)
                slot.done = None
        self.unranked_in_a_row += 1
        self._end_group(group, State.FAILED)

    def no_progress_reason(self) -> str | None:
        """Reason why training cannot progress any more; None if it can."""
        if self.failed_in_a_row >= max(8, self.rules.capacity):
            return f"the last {self.failed_in_a_row} groups all failed"
        if self.unranked_in_a_row >= max(8, self.rules.capacity):
            return f"the last {self.unranked_in_a_row} groups could not be ranked"
        if self.filtered_in_a_row >= max(256, 32 * self.rules.groups_per_batch):
            return (
                f"{self.filtered_in_a_row} groups were filtered since the last step: their rewards are all "
                "alike (tasks all solved, or all too hard), or their episodes were all truncated and masked"
            )
        return None

    def exhausts_attempts(self, attempt: str, outcome: Outcome) -> bool:
        """Whether ending the attempt with this outcome quarantines its task."""
        if outcome.trainable or outcome.blameless or attempt not in self._attempts:
            return False
        if self.outage.leaves_uncharged(attempt, outcome):
            return False
        group_id, slot = self._attempts[attempt]
        group = self.groups[group_id]
        last = group.slots[slot].failures + 1 >= self.rules.max_attempts
        return last and group.task not in self.quarantined

    def cancel_group(self, group_id: str) -> None:
        """End a group as `cancelled`, as the run stops; a resumed run issues its task again."""
        ticket = self.groups[group_id].ticket
        self._end_group(self.groups[group_id], State.CANCELLED)
        if ticket is not None:
            self._recycled.append(TaskTicket(ticket.index, None, ticket.stale_retries))

    # ------------------------------------------------------------------ consuming

    def lease(
        self, group_id: str, oldest: int | None, newest: int | None = None, solved: int | None = None
    ) -> None:
        """Mark a group as leased by the trainer.

        Args:
            group_id: A ready group.
            oldest: Oldest version among its sampled tokens.
            newest: Newest version among them; None if it equals `oldest`.
            solved: Number of its solved episodes; None if unknown.
        """
        group = self.groups[group_id]
        if group.phase is not Phase.READY:
            raise LedgerError(f"cannot lease group {group_id}: it is {group.phase}, not ready")
        group.phase = Phase.LEASED
        group.oldest, group.newest, group.solved = oldest, newest, solved
        self._leased_order.append(group_id)

    def accept(self, group: Group) -> str | None:
        """Take in a group that a client formed, as leased. Returns the reason if it is refused.

        A refused group is in no ledger entry. An accepted one is not issued again, however it ends.
        """
        oldest, newest = group.oldest_version(), group.newest_version()
        waiting = sum(self.groups[group_id].client == group.client for group_id in self._leased_order)
        admissible = self.admissible(oldest, newest)
        why = refusal(group, self.rules, self.version, waiting, admissible=admissible)
        if why is not None:
            return why
        number = len(group.trajectories)
        about = {"version": self.version, "client": group.client, "episodes": number}
        self._record(entry("group", "issued", id=group.id, task=group.task_id, **about))
        self.group_counts[State.LIVE] += 1
        state = GroupState(group.id, group.task_id, None, [], Phase.READY, client=group.client)
        self.groups[group.id] = state
        for trajectory in group.trajectories:
            slot = trajectory.slot or 0
            attempt = f"{group.id}.{slot}.1"
            state.slots += [Slot() for _ in range(slot + 1 - len(state.slots))]
            state.slots[slot] = Slot(issued=1, done=attempt, outcome=trajectory.outcome)
            self._attempts[attempt] = (group.id, slot)
            self.attempt_counts[State.LIVE] += 1
            self._record(entry("attempt", "issued", id=attempt, group=group.id, slot=slot, number=1))
        self.lease(group.id, oldest, newest, group.solved())
        return None

    def filter_group(self, group_id: str) -> None:
        """End a group that yields no gradient (equal rewards, or a loss that is not finite)."""
        self.filtered_in_a_row += 1
        group = self.groups[group_id]
        self._count_filtered(group.solved, len(group.successful_attempts()))
        self._end_group(group, State.FILTERED)

    def _count_filtered(self, solved: int | None, episodes: int) -> None:
        self.filtered_alike["solved"] += solved == episodes
        self.filtered_alike["failed"] += solved == 0

    def staleness(self, oldest: int | None) -> int | None:
        """Versions between the trainer and the oldest token; None if unknown."""
        return None if oldest is None or oldest > self.version else self.version - oldest

    def admissible(self, oldest: int | None, newest: int | None = None) -> bool:
        """Whether tokens of the versions `oldest` to `newest` may be trained on now."""
        staleness = self.staleness(oldest)
        bound = self.rules.max_staleness
        if oldest is None or staleness is None or (bound is not None and staleness > bound):
            return False
        last = oldest if newest is None else newest
        return not any(oldest <= version <= last for version in self.abandoned)

    def sweep(self) -> list[str]:
        """End every leased group that is too stale now, and return their ids."""
        leased = [self.groups[group_id] for group_id in self._leased_order]
        stale = [group.id for group in leased if not self.admissible(group.oldest, group.newest)]
        for group_id in stale:
            self.end_stale(group_id)
        return stale

    def select_batch(self, number: int | None = None) -> BatchSelection | None:
        """Select the next batch, or a minibatch of `number` groups, after dropping stale groups.

        Returns exactly that many groups in order of completion, or None if there are fewer.
        """
        self.sweep()
        size = self.rules.groups_per_batch if number is None else number
        chosen = choose(self._leased_order, self.groups, size, self.rules.client_limit(size))
        if len(chosen) < size:
            return None
        taken = set(chosen)
        self._leased_order = deque(group_id for group_id in self._leased_order if group_id not in taken)
        staleness = []
        for group_id in chosen:
            group = self.groups[group_id]
            group.phase = Phase.SELECTED
            age = self.staleness(group.oldest)
            assert age is not None
            staleness.append(age)
        return BatchSelection(self.version, chosen, staleness)

    def step(self, selection: BatchSelection, step: int) -> None:
        """Record an optimiser step on the batch; its groups make room at the next publish."""
        self.steps_done = self.curriculum.step = step
        self.filtered_in_a_row = 0
        untrained = {"untrained": selection.untrained} if selection.untrained else {}
        for group_id, age in zip(selection.groups, selection.staleness, strict=True):
            group = self.groups[group_id]
            group.phase = Phase.UNPUBLISHED
            self._record_end(
                group, State.STEPPED, step=step, version=selection.version, oldest=group.oldest,
                staleness=age, **untrained,
            )  # fmt: skip
            if not self.rules.publishes:
                del self.groups[group_id]

    # ------------------------------------------------------------------ publishing

    def will_be_stale(self, version: int, oldest: Mapping[str, int | None]) -> list[str]:
        """Return the groups, not leased yet, that will exceed the bound once `version` is live.

        `oldest` maps group ids to the oldest version sampled so far, None if nothing was sampled.
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
        """End a group as `stale`; its task is issued again while its retry budget lasts.

        Args:
            group_id: The group.
            version: Version that makes it stale, if it is not live yet.
            oldest: Oldest version sampled so far; known already if the group is leased.
        """
        group = self.groups[group_id]
        version = self.version if version is None else version
        oldest = group.oldest if oldest is None else oldest
        age = None if oldest is None else version - oldest
        self._end_group(
            group, State.STALE, version=version, oldest=oldest, newest=group.newest, staleness=age
        )
        ticket = group.ticket
        if ticket is not None and ticket.stale_retries < self.rules.max_stale_retries:
            self._recycled.append(TaskTicket(ticket.index, group.id, ticket.stale_retries + 1))

    def reserve_version(self, step: int, *, candidate: bool = False) -> int:
        """Reserve the next version number for the weights after `step`.

        The ledger records it before any engine receives it, so that no restart can reuse it. A `candidate`
        is tested first; groups may start meanwhile.
        """
        self._reserved += 1
        self._publishing = not candidate
        tested = {"candidate": True} if candidate else {}
        self._record(entry("run", "publishing", version=self._reserved, step=step, **tested))
        return self._reserved

    def promote(self, version: int, step: int, why: str, figures: Mapping[str, float]) -> None:
        """Record that a candidate goes live now."""
        self._publishing = True
        self._record(entry("run", "promoted", version=version, step=step, why=why, **figures))

    def roll_back(
        self, version: int, to: int, step: int, why: str, figures: Mapping[str, float] | None = None
    ) -> None:
        """Abandon the versions after `to` up to `version`: `sweep` ends the groups with tokens of them."""
        self._record(entry("run", "rolled_back", version=version, to=to, step=step, why=why, **figures or {}))
        self.abandoned |= set(range(to + 1, version + 1))
        self._end_unpublished()

    def mark_live(self, version: int) -> None:
        """Record that `version` is live on the engines; it is now the trainer's version."""
        if not self.version < version <= self._reserved:
            raise LedgerError(
                f"version {version} cannot go live after {self.version}; {self._reserved} was reserved"
            )
        self.version = version
        self._publishing = False
        self._end_unpublished()

    def _end_unpublished(self) -> None:
        """Make room for the groups that were trained on since the last publish."""
        for group_id in [g.id for g in self.groups.values() if g.phase is Phase.UNPUBLISHED]:
            del self.groups[group_id]

    def commit(self) -> None:
        """Count `stepped` groups as `trained`, as a checkpoint's marker was written."""
        for counts in (self.group_counts, self.attempt_counts):
            counts[State.TRAINED] += counts.pop(State.STEPPED, 0)

    # ------------------------------------------------------------------ resuming

    def progress(self) -> AdmissionProgress:
        """Return the cursor and the tickets that are outstanding or recycled."""
        groups = self.groups.values()
        outstanding = [group.ticket for group in groups if group.phase is not Phase.UNPUBLISHED]
        return AdmissionProgress(self._cursor, [*self._recycled, *filter(None, outstanding)])

    def restore(self, progress: AdmissionProgress, groups: Iterable[LedgerItem] = ()) -> None:
        """Restore a checkpoint's progress, without `replaces`: it names groups of an earlier epoch.

        Args:
            progress: The checkpoint's.
            groups: All groups of the ledger. Those issued after the checkpoint have tasks that a curriculum
                chose: these tasks are issued again, and none that it passed over.
        """
        self._cursor = progress.cursor
        self._recycled = deque(
            TaskTicket(ticket.index, None, ticket.stale_retries) for ticket in progress.tickets
        )
        groups = list(groups)
        self.curriculum.restore(groups)
        for group in groups:
            if group.state is State.FILTERED:
                self._count_filtered(group.solved, group.episodes)
        if self.rules.floor < 1:
            chosen = {group.issued.get("index", -1) for group in groups}
            self._recycled.extend(TaskTicket(index) for index in sorted(chosen) if index >= self._cursor)
            self._cursor = max(self._cursor, 1 + max(chosen, default=-1))

    def resume_group(self, group: GroupState) -> None:
        """Resume a group of an earlier epoch: ready, or leased if the trainer has its tokens.

        Its task is not issued again unless the group becomes stale.
        """
        self.groups[group.id] = group
        if group.phase is Phase.LEASED:
            self._leased_order.append(group.id)
        for number, slot in enumerate(group.slots):
            if slot.done is not None:
                self._attempts[slot.done] = (group.id, number)
        if group.ticket is None:
            return
        while self._cursor <= group.ticket.index:
            self._recycled.append(self._new_ticket())
        index = group.ticket.index
        self._recycled = deque(ticket for ticket in self._recycled if ticket.index != index)

    # ------------------------------------------------------------------ ledger entries

    def _end_group(self, group: GroupState, state: State, **details: object) -> None:
        self._record_end(group, state, **details)
        del self.groups[group.id]
        if group.phase is Phase.RUNNING:
            self._running -= sum(not slot.settled(self.rules) for slot in group.slots)
        elif group.phase is Phase.LEASED:
            self._leased_order.remove(group.id)

    def _record_end(self, group: GroupState, state: State, **details: object) -> None:
        """Record the ends of a group's attempts, then its own: no attempt is live in an ended group."""
        for slot in group.slots:
            if slot.done is not None:
                self._end_attempt(slot.done, state, slot.outcome or Outcome.COMPLETED, None)
            if slot.running is not None:
                self._end_attempt(slot.running, State.CANCELLED, Outcome.CANCELLED, f"group {state}")
        self.group_counts[State.LIVE] -= 1
        self.group_counts[state] += 1
        if group.solved is not None:
            details |= {"solved": group.solved, "episodes": len(group.successful_attempts())}
        self._record(entry("group", "ended", id=group.id, state=state.value, **details))
        if group.solved is not None and group.ticket is not None:
            episodes = len(group.successful_attempts())
            self.curriculum.observe(group.task, group.task_kind, group.solved, episodes, self.steps_done)

    def _end_attempt(
        self, attempt: str, state: State, outcome: Outcome, why: str | None, **details: object
    ) -> None:
        if state is not State.FAILED or outcome.trainable:
            self.outage.forget(attempt)
        del self._attempts[attempt]
        self.attempt_counts[State.LIVE] -= 1
        self.attempt_counts[state] += 1
        self._record(
            entry(
                "attempt", "ended", id=attempt, state=state.value, outcome=outcome.value, why=why, **details
            )
        )  # fmt: skip

"""Admission core: decides which groups may start, how failures count, and what a batch contains.

It has no clock, does no I/O and does not import torch. Events go in, decisions come out, and every issue
and ending is passed to `record`. The training loop, the simulator and the tests use this same object.

    start_group → start_attempt → end_attempt … → lease → select_batch → step → publish

A group that a client formed enters by `accept`, as a leased one, or is refused.

**Start rule.** A group may start only if groups in flight < (max_staleness + 1) · groups_per_batch ·
publish_interval. Groups in flight are running, ready, leased, or trained on since the last publish: a
trained group stops counting only when the resulting version is live. With staleness 0 the run is therefore
exactly synchronous. Groups that end stale, filtered or failed stop counting at once. Near the end of the run
no group starts beyond what the remaining steps need. No group starts during a publish: it would sample
from the previous weights and become stale one version sooner.

**Hard bound.** `end_stale_groups` ends groups by *oldest sampled version* when a batch is assembled, and
`select_batch` raises if one is left. The start rule only reduces waste; the bound does not depend on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tidegate.errors import LedgerError
from tidegate.trainer.admission.failures import Failures, Streaks
from tidegate.trainer.admission.groups_in_flight import GroupsInFlight, choose, refusal_reason
from tidegate.trainer.admission.outage import Outage
from tidegate.trainer.admission.pace import Pace
from tidegate.trainer.admission.rules import AttemptDecision, Rules
from tidegate.trainer.admission.state import GroupState, Phase, Slot, TaskCursor, TaskTicket
from tidegate.trainer.admission.versions import PolicyVersions
from tidegate.trainer.ledger.entries import LedgerEntry, State
from tidegate.trainer.ledger.state import LedgerItem
from tidegate.types import Group, Outcome


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
        self.epoch = epoch
        self.streaks = Streaks(rules, stepped=step > 0)
        self.filtered_alike: Counter[str] = Counter()
        """Groups that ended `filtered` with all episodes solved ("solved"), or none ("failed")."""
        self.stale_ages: Counter[int] = Counter()
        """Groups that ended stale, by the staleness of their oldest token."""
        self.versions = PolicyVersions(rules, record, version)
        self.outage = Outage(record)
        self.pace = Pace(deadline_s=rules.deadline_s, tokens=rules.reply_tokens)
        self._in_flight = GroupsInFlight(rules, record, self.outage, self.pace)
        self.groups = self._in_flight.by_id
        """Groups in flight by id."""
        self.group_counts, self.attempt_counts = self._in_flight.group_counts, self._in_flight.attempt_counts
        """Groups and attempts issued so far, by state."""
        self.failures = Failures(rules, record, self._in_flight, self.outage)
        self.cursor = TaskCursor()
        self._record = record
        self._number = 0
        self._steps_taken = step

    @property
    def version(self) -> int:
        """Policy version that is live."""
        return self.versions.live

    # ------------------------------------------------------------------ starting

    def blocked_by(self) -> str | None:
        """Reason why no group may start now; None if one may start."""
        # With no episode in progress a group may start, whose first attempt is the probe.
        if (outage := self.outage.why) is not None and (self.outage.down or self._in_flight.unsettled):
            return f"an outage pauses the run: {outage}"
        if self.versions.publishing:
            return f"version {self.versions.reserved} is being published"
        if len(self.groups) >= self.rules.capacity:
            return f"{len(self.groups)} groups are in flight, the limit that trainer.max_staleness allows"
        # One group may always run: under a limit smaller than a group, none would ever start.
        if (busy := self._in_flight.unsettled) and busy + self.rules.group_size > self.rules.max_running:
            return f"{busy} episodes are in progress; another group would exceed agent.max_concurrency"
        if busy and busy + self.rules.group_size > self.pace.limit:
            return (
                f"{busy} episodes are in progress; the engines, at {self.pace.rate:.3g} tokens/s, serve "
                f"{self.pace.limit:.0f} within agent.deadline_s"
            )
        if (needed := self._needed()) is not None and needed <= 0:
            return "enough groups are in flight for the remaining steps"
        return None

    def _needed(self) -> int | None:
        """Number of further groups that the remaining steps need; None if unknown."""
        if self.rules.steps is None:
            return None
        to_train = sum(group.phase is not Phase.UNPUBLISHED for group in self.groups.values())
        return (self.rules.steps - self._steps_taken) * self.rules.groups_per_batch - to_train

    def start_group(self, ticket: TaskTicket, task: str, task_kind: str = "") -> GroupState | None:
        """Issue a group. Returns None, and uses up the ticket, if the task is quarantined."""
        if task in self.failures.quarantined:
            return None
        if (blocked := self.blocked_by()) is not None:
            raise LedgerError(f"cannot start a group for task {task}: {blocked}")
        self._number += 1
        slots = [Slot() for _ in range(self.rules.group_size)]
        group = GroupState(f"g{self.epoch}-{self._number:06d}", task, ticket, slots)
        self._in_flight.issue(
            group, index=ticket.index, version=self.version, replaces=ticket.replaces, task_kind=task_kind
        )
        return group

    def may_attempt(self) -> bool:
        """Whether an attempt may start now: there is no outage, and the engines are not too slow for it."""
        return self.outage.may_attempt() and self.pace.free >= 1

    def start_attempt(self, group_id: str, slot: int) -> str:
        """Issue an attempt for a slot and return its id."""
        group = self.groups[group_id]
        state = group.slots[slot]
        if state.running is not None or state.settled(self.rules):
            raise LedgerError(f"cannot start group {group_id} slot {slot}: it is running or settled")
        if not self.outage.may_attempt():
            raise LedgerError(f"cannot start group {group_id} slot {slot} in an outage: {self.outage.why}")
        state.issued += 1
        attempt = state.running = f"{group_id}.{slot}.{state.issued}"
        self.outage.started(attempt)
        self.pace.started(attempt)
        self._in_flight.issue_attempt(group, slot, attempt, state.issued)
        return attempt

    # ------------------------------------------------------------------ ending

    def end_attempt(
        self,
        attempt: str,
        outcome: Outcome,
        why: str | None = None,
        *,
        slow: bool = False,
        tokens: float = 0.0,
    ) -> AttemptDecision:
        """Record the end of an attempt; return what follows from it. A successful one occupies its slot.

        Args:
            attempt: The attempt.
            outcome: Its outcome.
            why: The reason of a failure.
            slow: Whether it timed out while a call waited for engines that serve.
            tokens: Number of its sampled tokens.
        """
        if (found := self._in_flight.slot_of(attempt)) is None:
            return AttemptDecision.LATE
        group, number = found
        slot = group.slots[number]
        slot.running = None
        if slow or outcome.trainable:
            self.pace.ended(attempt, tokens, slow=slow)
        else:
            self.pace.forget(attempt)
        if outcome.trainable:
            slot.done = attempt
            slot.outcome = outcome
            self.outage.ended(attempt, outcome, why)
        else:
            self.failures.charge(slot, attempt, outcome, why, slow=slow)
            if not slot.settled(self.rules):
                return AttemptDecision.RETRY
            if slot.failures >= self.rules.max_attempts:
                self.failures.quarantine(group, outcome, why)
        self._in_flight.unsettled -= 1
        return self._settle(group)

    def _settle(self, group: GroupState) -> AttemptDecision:
        lost = sum(slot.done is None and slot.settled(self.rules) for slot in group.slots)
        if len(group.slots) - lost < self.rules.min_group_size:
            self.streaks.failed += 1
            self._in_flight.end(group, State.FAILED)
            return AttemptDecision.FAILED
        if not all(slot.settled(self.rules) for slot in group.slots):
            return AttemptDecision.WAIT
        group.phase = Phase.READY
        self.streaks.failed = 0
        return AttemptDecision.READY

    def fail_group(self, group_id: str, outcome: Outcome, why: str) -> None:
        """End a group, all of whose slots are settled, as `failed`: its episodes have no reward after all."""
        group = self.groups[group_id]
        for slot in group.slots:
            self.failures.withdraw(slot, outcome, why)
        self.streaks.unranked += 1
        self._in_flight.end(group, State.FAILED)

    def cancel_group(self, group_id: str) -> None:
        """End a group as `cancelled`, as the run stops; a resumed run issues its task again."""
        ticket = self.groups[group_id].ticket
        self._in_flight.end(self.groups[group_id], State.CANCELLED)
        if ticket is not None:
            # Without `replaces`: only a stale group is replaced, and the audit checks it.
            self.cursor.recycle(TaskTicket(ticket.index, None, ticket.stale_retries))

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
        self._in_flight.leased.append(group_id)

    def accept(self, group: Group) -> str | None:
        """Take in a group that a client formed, as leased. Returns the reason if it is refused.

        A refused group is in no ledger entry. An accepted one is not issued again, however it ends.
        """
        oldest, newest = group.oldest_version(), group.newest_version()
        waiting = sum(self.groups[group_id].client == group.client for group_id in self._in_flight.leased)
        admissible = self.versions.admissible(oldest, newest)
        why = refusal_reason(group, self.rules, self.version, waiting, admissible=admissible)
        if why is not None:
            return why
        self._in_flight.add_client_group(group, self.version)
        self.lease(group.id, oldest, newest, group.solved())
        return None

    def filter_group(self, group_id: str, *, cut: bool = False, why: str | None = None) -> None:
        """End a group that yields no gradient (equal rewards, or a loss that is not finite).

        Args:
            group_id: The group.
            cut: Whether every episode of the group was cut at a token limit.
            why: Name of the user's own filter that refused it.
        """
        group = self.groups[group_id]
        episodes = len(group.successful_attempts())
        self._count_filtered(group.solved, episodes)
        cut_and_failed = cut and group.solved == 0
        self.filtered_alike["cut"] += cut_and_failed
        self.streaks.filter(solved=why is None and group.solved == episodes, cut=cut_and_failed)
        self._in_flight.end(group, State.FILTERED, **({} if why is None else {"why": why}))

    def _count_filtered(self, solved: int | None, episodes: int) -> None:
        self.filtered_alike["solved"] += solved == episodes
        self.filtered_alike["failed"] += solved == 0

    def end_stale_groups(self) -> list[str]:
        """Enforce the staleness bound: end every leased group that exceeds it now, and return their ids."""
        leased = [self.groups[group_id] for group_id in self._in_flight.leased]
        stale = [group.id for group in leased if not self.versions.admissible(group.oldest, group.newest)]
        for group_id in stale:
            self.end_stale(group_id)
        return stale

    def select_batch(self, number: int | None = None) -> list[str] | None:
        """Select the next batch, or a minibatch of `number` groups; `end_stale_groups` comes before.

        Returns the ids of exactly that many groups in order of completion, or None if there are fewer. Raises
        LedgerError if one of them exceeds the staleness bound.
        """
        size = self.rules.groups_per_batch if number is None else number
        chosen = choose(self._in_flight.leased, self.groups, size, self.rules.client_limit(size))
        if len(chosen) < size:
            return None
        for group in self._in_flight.select(chosen):
            age = self.versions.staleness(group.oldest)
            if age is None or not self.versions.admissible(group.oldest, group.newest):
                raise LedgerError(
                    f"group {group.id} exceeds the staleness bound: end_stale_groups was not called"
                )
            group.version, group.staleness = self.version, age
        return chosen

    def step(self, groups: Sequence[str], step: int, untrained: int = 0) -> None:
        """Record a step on a batch; its groups stop counting towards the capacity at the next publish.

        Args:
            groups: The groups that were trained on. No publish lies between the minibatches of a batch.
            step: Number of the step.
            untrained: Number of further groups of the batch, on which no optimiser step was taken.
        """
        self._steps_taken = step
        self.streaks.step()
        self._in_flight.step(groups, step, untrained)

    # ------------------------------------------------------------------ publishing

    def will_be_stale(self, version: int, oldest: Mapping[str, int | None]) -> list[str]:
        """Return the groups, not leased yet, that will exceed the bound once `version` is live.

        `oldest` maps group ids to the oldest version sampled so far, None if nothing was sampled.
        """
        waiting = (Phase.RUNNING, Phase.READY)
        return [
            group_id
            for group_id, sampled in oldest.items()
            if self.versions.exceeds_bound(version, sampled)
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
        if age is not None:
            self.stale_ages[age] += 1
        self._in_flight.end(
            group, State.STALE, version=version, oldest=oldest, newest=group.newest, staleness=age
        )
        ticket = group.ticket
        if ticket is not None and ticket.stale_retries < self.rules.max_stale_retries:
            self.cursor.recycle(TaskTicket(ticket.index, group.id, ticket.stale_retries + 1))

    def roll_back(
        self, version: int, to: int, step: int, why: str, figures: Mapping[str, float] | None = None
    ) -> None:
        """Abandon the versions after `to` up to `version`; `end_stale_groups` ends their groups."""
        self.versions.roll_back(version, to, step, why, figures or {})
        self.streaks.step()  # of another policy
        self._in_flight.remove_unpublished()

    def mark_live(self, version: int) -> None:
        """Record that `version` is live on the engines; it is now the trainer's version."""
        self.versions.mark_live(version)
        self._in_flight.remove_unpublished()

    def stepped(self) -> tuple[int, int]:
        """Return the number of groups and of attempts that are `stepped`."""
        return self.group_counts[State.STEPPED], self.attempt_counts[State.STEPPED]

    def commit(self, stepped: tuple[int, int] | None = None) -> None:
        """Count `stepped` groups as `trained`, as a checkpoint's marker was written.

        `stepped` has the numbers when the checkpoint began; by default all are counted.
        """
        self._in_flight.commit(stepped or self.stepped())

    # ------------------------------------------------------------------ resuming

    def progress(self) -> dict[str, Any]:
        """Return what a checkpoint's marker has: the cursor, and the tickets that are recycled or of groups
        that have not ended."""
        live = [group.ticket for group in self.groups.values() if group.phase is not Phase.UNPUBLISHED]
        return self.cursor.progress(filter(None, live))

    def restore(self, progress: Mapping[str, Any] | None, groups: Iterable[LedgerItem] = ()) -> None:
        """Restore a checkpoint's progress, if there is one, and count the `groups` of the ledger."""
        for group in groups:
            if group.state is State.FILTERED:
                self._count_filtered(group.end.get("solved"), group.end.get("episodes", 0))
        if progress is not None:
            self.cursor.restore(progress)

    def resume_group(self, group: GroupState) -> None:
        """Resume a group of an earlier epoch: ready, or leased if the trainer has its tokens.

        Its task is not issued again unless the group becomes stale.
        """
        self._in_flight.resume(group)
        if group.ticket is not None:
            self.cursor.take(group.ticket.index)

"""Groups in flight and their attempts. Each issue and end is counted, and entered in the ledger.

Groups that clients form may be refused, and one client may have a limited share of a batch.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from tidegate.errors import LedgerError
from tidegate.trainer.admission.outage import Outage
from tidegate.trainer.admission.pace import Pace
from tidegate.trainer.admission.rules import Rules
from tidegate.trainer.admission.state import GroupState, Phase, Slot
from tidegate.trainer.ledger.entries import LedgerEntry, State, entry
from tidegate.types import Group, Outcome


class GroupsInFlight:
    """Groups from their issue until their end or the publish after their step.

    Args:
        rules: Limits that decide which slots are settled.
        record: Receives every ledger entry, in order.
        outage: Is notified of attempts that start or are cancelled.
        pace: Is notified of attempts that are cancelled.
    """

    def __init__(
        self,
        rules: Rules,
        record: Callable[[LedgerEntry], None],
        outage: Outage,
        pace: Pace,
    ) -> None:
        self.by_id: dict[str, GroupState] = {}
        self.group_counts: Counter[State] = Counter()
        self.attempt_counts: Counter[State] = Counter()
        self.unsettled = 0
        """Number of slots whose episodes run or will be attempted again."""
        self.leased: deque[str] = deque()
        """Leased groups that no batch has taken yet, in order of completion."""
        self._rules = rules
        self._record = record
        self._outage = outage
        self._pace = pace
        self._attempts: dict[str, tuple[str, int]] = {}

    def issue(self, group: GroupState, **details: object) -> None:
        """Add a group."""
        self.by_id[group.id] = group
        self.unsettled += len(group.slots)
        self.group_counts[State.LIVE] += 1
        self._record(entry("group", "issued", id=group.id, task=group.task, **details))

    def issue_attempt(self, group: GroupState, slot: int, attempt: str, number: int) -> None:
        """Add the attempt with this number to a slot."""
        self._attempts[attempt] = (group.id, slot)
        self.attempt_counts[State.LIVE] += 1
        self._record(entry("attempt", "issued", id=attempt, group=group.id, slot=slot, number=number))

    def add_client_group(self, group: Group, version: int) -> None:
        """Add a group that a client formed, with its finished attempts, as ready."""
        state = GroupState(group.id, group.task_id, None, [], phase=Phase.READY, client=group.client)
        self.issue(state, version=version, client=group.client, episodes=len(group.trajectories))
        for trajectory in group.trajectories:
            slot = trajectory.slot or 0
            attempt = f"{group.id}.{slot}.1"
            # A client's episodes need not be in the order of their slots.
            state.slots += [Slot() for _ in range(slot + 1 - len(state.slots))]
            state.slots[slot] = Slot(issued=1, done=attempt, outcome=trajectory.outcome)
            self.issue_attempt(state, slot, attempt, 1)

    def slot_of(self, attempt: str) -> tuple[GroupState, int] | None:
        """Return the group and the slot of an attempt; None if it has ended."""
        if attempt not in self._attempts:
            return None
        group_id, slot = self._attempts[attempt]
        return self.by_id[group_id], slot

    def end(self, group: GroupState, state: State, **details: object) -> None:
        """End a group that no step was taken on."""
        self._record_end(group, state, **details)
        del self.by_id[group.id]
        if group.phase is Phase.RUNNING:
            self.unsettled -= sum(not slot.settled(self._rules) for slot in group.slots)
        elif group.phase is Phase.LEASED:
            self.leased.remove(group.id)

    def _record_end(self, group: GroupState, state: State, **details: object) -> None:
        """Record the ends of a group's attempts, then its own: no attempt is live in an ended group."""
        for slot in group.slots:
            if slot.done is not None:
                self.end_attempt(slot.done, state, slot.outcome or Outcome.COMPLETED, None)
            if slot.running is not None:
                self.end_attempt(slot.running, State.CANCELLED, Outcome.CANCELLED, f"group {state}")
        self.group_counts[State.LIVE] -= 1
        self.group_counts[state] += 1
        if group.solved is not None:
            details |= {"solved": group.solved, "episodes": len(group.successful_attempts())}
        self._record(entry("group", "ended", id=group.id, state=state.value, **details))

    def select(self, chosen: Sequence[str]) -> list[GroupState]:
        """Take leased groups for a batch, and return them."""
        taken = set(chosen)
        self.leased = deque(group_id for group_id in self.leased if group_id not in taken)
        groups = [self.by_id[group_id] for group_id in chosen]
        for group in groups:
            group.phase = Phase.SELECTED
        return groups

    def step(self, groups: Sequence[str], step: int, untrained: int) -> None:
        """End the groups of a batch as `stepped`; they are in flight until the version is live."""
        versions = sorted({self.by_id[group_id].version for group_id in groups})
        if len(versions) != 1:
            raise LedgerError(f"minibatches of one batch were selected at different versions: {versions}")
        more = {"untrained": untrained} if untrained else {}
        for group_id in groups:
            group = self.by_id[group_id]
            group.phase = Phase.UNPUBLISHED
            self._record_end(
                group, State.STEPPED, step=step, version=group.version, oldest=group.oldest,
                staleness=group.staleness, **more,
            )  # fmt: skip
            if not self._rules.publishes:
                del self.by_id[group_id]

    def end_attempt(
        self, attempt: str, state: State, outcome: Outcome, why: str | None, **details: object
    ) -> None:
        """Record the end of an attempt; it has not ended if that raises."""
        self._record(
            entry(
                "attempt", "ended", id=attempt, state=state.value, outcome=outcome.value, why=why, **details
            )
        )  # fmt: skip
        self._pace.forget(attempt)
        if state is not State.FAILED or outcome.trainable:
            self._outage.forget(attempt)
        del self._attempts[attempt]
        self.attempt_counts[State.LIVE] -= 1
        self.attempt_counts[state] += 1

    def remove_unpublished(self) -> None:
        """Make room for the groups that were trained on since the last publish."""
        for group_id in [g.id for g in self.by_id.values() if g.phase is Phase.UNPUBLISHED]:
            del self.by_id[group_id]

    def commit(self, stepped: tuple[int, int]) -> None:
        """Count so many `stepped` groups and attempts as `trained`."""
        for counts, number in zip((self.group_counts, self.attempt_counts), stepped, strict=True):
            counts[State.TRAINED] += number
            counts[State.STEPPED] -= number

    def resume(self, group: GroupState) -> None:
        """Add a group of an earlier epoch, which the ledger has already."""
        self.by_id[group.id] = group
        if group.phase is Phase.LEASED:
            self.leased.append(group.id)
        for number, slot in enumerate(group.slots):
            if slot.done is not None:
                self._attempts[slot.done] = (group.id, number)


def refusal_reason(group: Group, rules: Rules, version: int, waiting: int, *, admissible: bool) -> str | None:
    """Return why a client's group is refused, None if it is accepted.

    Args:
        group: The group.
        rules: The run's rules.
        version: The version that is live.
        waiting: Number of the client's accepted groups that no batch has taken yet.
        admissible: Whether the staleness bound admits the group's tokens.
    """
    number, newest = len(group.trajectories), group.newest_version()
    if not rules.min_group_size <= number <= rules.group_size:
        sizes = dict.fromkeys((rules.min_group_size, rules.group_size))
        return f"it has {number} episodes, and the run takes {' to '.join(map(str, sizes))}"
    if newest is not None and newest > version:
        return f"it has tokens of version {newest}, which this run has not published"
    if not admissible:
        return (
            f"stale: its oldest token is of version {group.oldest_version()}, the trainer is at version "
            f"{version}, and the staleness bound is {rules.max_staleness}"
        )
    if rules.client_share < 1 and waiting >= rules.client_capacity:
        return (
            f"{waiting} groups of {group.client} wait, and trainer.max_client_share = {rules.client_share:g} "
            f"admits {rules.client_limit(rules.groups_per_batch)} to a batch"
        )
    return None


def choose(order: Iterable[str], groups: Mapping[str, GroupState], size: int, limit: int) -> list[str]:
    """Return the first `size` groups in `order` with at most `limit` of any one client; fewer if need be."""
    chosen: list[str] = []
    taken: Counter[str] = Counter()
    for group_id in order:
        client = groups[group_id].client
        if len(chosen) == size:
            break
        if client is not None and taken[client] >= limit:
            continue
        if client is not None:
            taken[client] += 1
        chosen.append(group_id)
    return chosen

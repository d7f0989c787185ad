"""Failed attempts: the budgets that they are charged to, their causes, and the tasks in quarantine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from tidegate.trainer.admission.groups_in_flight import GroupsInFlight
from tidegate.trainer.admission.outage import Outage
from tidegate.trainer.admission.rules import Rules
from tidegate.trainer.admission.state import GroupState, Slot
from tidegate.trainer.ledger.entries import LedgerEntry, State, entry, failure_cause
from tidegate.types import Outcome


class Failures:
    """Failures of a run's attempts.

    Args:
        rules: Limits of a slot's failures.
        record: Receives every ledger entry, in order.
        in_flight: Groups in flight, whose attempts end here as failed.
        outage: Decides which failures are charged, and is notified of those that were not cancelled.
    """

    def __init__(
        self,
        rules: Rules,
        record: Callable[[LedgerEntry], None],
        in_flight: GroupsInFlight,
        outage: Outage,
    ) -> None:
        self.quarantined: set[str] = set()
        """Tasks that are not issued again."""
        self.causes: Counter[str] = Counter()
        """Failed attempts by cause (`failure_cause`)."""
        self._rules = rules
        self._record = record
        self._in_flight = in_flight
        self._outage = outage

    def charge(self, slot: Slot, attempt: str, outcome: Outcome, why: str | None, *, slow: bool) -> None:
        """Charge a failure to the slot's budget for its kind, or to none in an outage.

        `cancelled` is a failure here: the process that ran the agent exited.
        """
        details = {"lost": True} if outcome is Outcome.CANCELLED else {"slow": True} if slow else {}
        if self._outage.leaves_uncharged(attempt, outcome):
            details["spared"] = True
        else:
            blameless = slow or outcome.is_infrastructure_failure
            slot.infra_failures += blameless
            slot.failures += not blameless
        self.causes[failure_cause(outcome, spared="spared" in details, slow=slow)] += 1
        state = State.CANCELLED if outcome is Outcome.CANCELLED else State.FAILED
        self._in_flight.end_attempt(attempt, state, outcome, why, **details)
        if outcome is not Outcome.CANCELLED:
            self._outage.ended(attempt, outcome, why, slow=slow)

    def withdraw(self, slot: Slot, outcome: Outcome, why: str) -> None:
        """End a slot's successful attempt as failed, charged to no budget: it has no reward after all."""
        if slot.done is None:
            return
        spared = self._outage.overlapped(slot.done)
        self.causes[failure_cause(outcome, spared=spared)] += 1
        details = {"spared": True} if spared else {}
        self._in_flight.end_attempt(slot.done, State.FAILED, outcome, why, **details)
        slot.done = None

    def quarantine(self, group: GroupState, outcome: Outcome, why: str | None) -> None:
        """Put the group's task in quarantine, if it is not there yet."""
        if group.task not in self.quarantined:
            self.quarantined.add(group.task)
            self._record(
                entry("run", "quarantined", task=group.task, group=group.id, outcome=outcome.value, why=why)
            )

    def would_quarantine(self, attempt: str, outcome: Outcome, *, slow: bool = False) -> bool:
        """Whether ending the attempt with this outcome quarantines its task."""
        found = self._in_flight.slot_of(attempt)
        if slow or outcome.trainable or outcome.is_infrastructure_failure or found is None:
            return False
        if self._outage.leaves_uncharged(attempt, outcome):
            return False
        group, slot = found
        last = group.slots[slot].failures + 1 >= self._rules.max_attempts
        return last and group.task not in self.quarantined

    def lift(self, task: str) -> bool:
        """Issue a quarantined task again when its turn comes; returns whether it was quarantined."""
        if task not in self.quarantined:
            return False
        self.quarantined.remove(task)
        self._record(entry("run", "lifted", task=task))
        return True

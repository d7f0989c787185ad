"""Failed attempts: the budgets that they are charged to, their causes, and the tasks in quarantine.

`Streaks` counts consecutive groups that training cannot use, up to the limits at which a run stops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

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


SOLVED = 0.95
"""Share of all-solved groups among the filtered ones from which on nothing is left to learn."""


@dataclass(slots=True)
class Streaks:
    """Groups in a row that failed, were not ranked, or were filtered."""

    rules: Rules
    failed: int = 0
    unranked: int = 0
    """Groups whose ranking failed since one was sealed."""
    filtered: int = 0
    """Filtered groups since the last step."""
    cut: int = 0
    """Those of them that failed with every episode cut at a token limit."""
    solved: int = 0
    """Those of them whose episodes all had the same reward, above 0."""
    stepped: bool = False
    """Whether the run has taken a step, so that its rewards differed once."""

    def solved_reason(self) -> str | None:
        """Why nothing is left to learn; None if something may be."""
        if not self.stepped or not self._only_filtered() or self.solved < SOLVED * self.filtered:
            return None
        return (
            f"nothing is left to learn: in {self.solved} of the {self.filtered} groups since the last step "
            "all episodes have the same reward, above 0"
        )

    def _only_filtered(self) -> bool:
        return self.filtered >= max(256, 32 * self.rules.groups_per_batch)

    def filter(self, *, solved: bool, cut: bool) -> None:
        """Count a filtered group."""
        self.filtered += 1
        self.solved += solved
        self.cut += cut

    def step(self) -> None:
        """Begin the count of filtered groups again."""
        self.filtered = self.cut = self.solved = 0
        self.stepped = True

    def no_progress_reason(self) -> str | None:
        """Reason why training cannot progress any more; None if it can, or if nothing is left to learn."""
        if self.failed >= max(8, self.rules.capacity):
            return f"the last {self.failed} groups all failed"
        if self.unranked >= max(8, self.rules.capacity):
            return f"the last {self.unranked} groups could not be ranked"
        if self._only_filtered() and self.solved_reason() is None:
            if 2 * self.cut > self.filtered:
                return (
                    f"{self.filtered} groups were filtered since the last step, and in {self.cut} of them "
                    "every reply was cut at a token limit before it could earn a reward: raise "
                    "sampling.max_tokens, engine.max_context or the agent's own max_tokens"
                )
            return (
                f"{self.filtered} groups were filtered since the last step: their rewards are all equal "
                "(tasks all solved, or all too hard), their episodes were all truncated and masked, or no "
                "episode has a token to train on"
            )
        return None

"""Going on after a crash or a stop: what the ledger says, and what has to be put right in it.

The checkpoint's marker is the only commit point. Groups stepped on behind it stay `stepped`; what was live
when the processes died ends `cancelled`, and its tasks are issued again. Versions behind the marker are
an abandoned lineage: the restored weights are published under a number never used before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tidegate.trainer.entries import Entry, State, entry
from tidegate.trainer.ledger import read_ledger
from tidegate.types import Outcome


@dataclass(slots=True)
class Past:
    """What an existing ledger tells. A run without one has an empty past."""

    epoch: int = 0
    highest_version: int = -1
    groups: dict[str, str] = field(default_factory=dict)
    """Group id → the state that was entered, or `live`."""
    attempts: dict[str, str] = field(default_factory=dict)
    stepped_at: dict[str, int] = field(default_factory=dict)
    """Stepped groups and attempts of the surviving lineage → `seq` of their ending."""

    def read(self, one: Entry) -> None:
        """Take in the next entry."""
        if one["kind"] == "run":
            self.epoch = max(self.epoch, one.get("epoch") or 0)
            self.highest_version = max(self.highest_version, one.get("version", -1))
            if one["event"] == "started":
                self.abandon(one.get("position") or 0)
            return
        items = self.groups if one["kind"] == "group" else self.attempts
        items[one["id"]] = State.LIVE.value if one["event"] == "issued" else one["state"]
        if one.get("state") == State.STEPPED:
            self.stepped_at[one["id"]] = one["seq"]

    def abandon(self, position: int) -> None:
        """A run went on from the marker at `position`: what was stepped on behind it is lost."""
        self.stepped_at = {name: seq for name, seq in self.stepped_at.items() if seq < position}

    def live(self) -> tuple[list[str], list[str]]:
        """Attempts and groups that never ended."""
        return (
            [name for name, state in self.attempts.items() if state == State.LIVE],
            [name for name, state in self.groups.items() if state == State.LIVE],
        )

    def counts(self, items: dict[str, str], committed: int) -> Counter[State]:
        """By state; what was stepped on before ledger position `committed` counts as trained."""
        found: Counter[State] = Counter()
        for name, said in items.items():
            state = State(said)
            if state is State.STEPPED and self.stepped_at.get(name, committed) < committed:
                state = State.TRAINED
            found[state] += 1
        return found


def read_past(ledger: Path) -> Past:
    """Fold a ledger; an absent one gives an empty past. Raises LedgerError on a damaged one."""
    past = Past()
    if not ledger.exists():
        return past
    for one in read_ledger(ledger):
        past.read(one)
    return past


def bury(past: Past, book: Callable[[Entry], None]) -> int:
    """End what was live when the run died; returns how many groups that were."""
    attempts, groups = past.live()
    why = "the processes that ran it ended"
    for name in attempts:
        past.attempts[name] = State.CANCELLED.value
        book(
            entry(
                "attempt", "ended", id=name, state=State.CANCELLED.value,
                outcome=Outcome.CANCELLED.value, why=why,
            )
        )  # fmt: skip
    for name in groups:
        past.groups[name] = State.CANCELLED.value
        book(entry("group", "ended", id=name, state=State.CANCELLED.value, why=why))
    return len(groups)

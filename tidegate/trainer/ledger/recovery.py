"""Recovery after a crash or a stop: reads the state from the ledger and adds the entries that repair it.

A checkpoint's marker is the only commit point. Groups trained on after it are rolled back: their step is
lost, so they are live again, with their tokens from `trajectories/`, and end once more. Versions published
after the marker are abandoned: their tokens are not trained on, and the restored weights are published under
a new number. Groups that ran when the processes exited end `cancelled`, and their tasks are issued again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tidegate.trainer.ledger.entries import LedgerEntry, State, entry
from tidegate.trainer.ledger.ledger import read_ledger
from tidegate.types import Outcome


@dataclass(slots=True)
class LedgerItem:
    """State of a group or an attempt after the entries so far."""

    issued: LedgerEntry
    state: State = State.LIVE
    ended_at: int = -1
    """`seq` of the entry of its end."""
    outcome: str | None = None
    rolled_back: bool = False
    """It ended `stepped` after the marker that a later start resumed from, and is not reinstated yet."""

    @property
    def final(self) -> State:
        """State after abandoned steps are excluded and all others are committed."""
        return State.TRAINED if self.state is State.STEPPED and not self.rolled_back else self.state


@dataclass(slots=True)
class LedgerState:
    """State of a run after all entries of its ledger; empty for a new run."""

    epoch: int = 0
    groups: dict[str, LedgerItem] = field(default_factory=dict)
    attempts: dict[str, LedgerItem] = field(default_factory=dict)
    abandoned: set[int] = field(default_factory=set)
    """Versions published after a marker that a later start resumed from."""
    quarantined: set[str] = field(default_factory=set)
    """Tasks quarantined for failures of their own; older ledgers also quarantined tasks in an outage."""
    _versions: list[tuple[int, int]] = field(default_factory=list)
    """(`seq` of the entry, version) of every publish."""
    _members: dict[str, list[str]] = field(default_factory=dict)

    @property
    def highest_version(self) -> int:
        return max((version for _, version in self._versions), default=-1)

    def apply(self, line: LedgerEntry) -> None:
        """Update the state with the next entry."""
        if line["kind"] == "run":
            self._apply_run(line)
            return
        items = self.groups if line["kind"] == "group" else self.attempts
        if line["event"] == "issued":
            items[line["id"]] = LedgerItem(line)
            if line["kind"] == "attempt":
                self._members.setdefault(line["group"], []).append(line["id"])
        elif line["event"] == "put_back":
            for item in self._with_members(line["id"]):
                if item.state is State.STEPPED:
                    item.state, item.rolled_back = State.LIVE, False
        else:
            item = items[line["id"]]
            item.state, item.ended_at, item.outcome = State(line["state"]), line["seq"], line.get("outcome")

    def _apply_run(self, line: LedgerEntry) -> None:
        self.epoch = max(self.epoch, line.get("epoch") or 0)
        if line["event"] == "started":
            self.abandon(line.get("position") or 0)
        if line["event"] == "quarantined" and line.get("outcome") != Outcome.INFRA_ERROR:
            self.quarantined.add(line["task"])
        if line["event"] == "lifted":
            self.quarantined.discard(line["task"])
        if line["event"] in ("started", "publishing"):
            self._versions.append((line["seq"], line["version"]))

    def abandon(self, position: int) -> None:
        """Abandon steps and versions after `position`, that of the marker that a run resumes from.

        The run's first version, in the first entry, stays valid even without a marker.
        """
        self.abandoned |= {version for seq, version in self._versions if seq >= max(1, position)}
        for items in (self.groups, self.attempts):
            for item in items.values():
                item.rolled_back |= item.state is State.STEPPED and item.ended_at >= position

    def _with_members(self, group: str) -> list[LedgerItem]:
        return [self.groups[group], *(self.attempts[name] for name in self._members.get(group, []))]

    def rolled_back(self) -> list[str]:
        """Return the groups to reinstate, in the order in which they were trained on.

        A crash between two entries may leave a group whose attempts ended and which has not.
        """
        ended_at = {
            name: max(item.ended_at for item in self._with_members(name))
            for name in self.groups
            if any(item.rolled_back for item in self._with_members(name))
        }
        return sorted(ended_at, key=ended_at.__getitem__)

    def live(self) -> list[str]:
        """Return the groups that have not ended."""
        return [name for name, group in self.groups.items() if group.state is State.LIVE]

    def live_attempts(self, group: str) -> dict[int, str]:
        """Return a group's live attempts by slot. Those of a sealed group are its successful ones."""
        members = self._members.get(group, [])
        return {
            self.attempts[name].issued["slot"]: name
            for name in members
            if self.attempts[name].state is State.LIVE
        }

    def counts(self, items: Mapping[str, LedgerItem]) -> Counter[State]:
        """Count items by state; `stepped` counts as `trained` unless rolled back."""
        return Counter(item.final for item in items.values())


def read_ledger_state(ledger: Path) -> LedgerState:
    """Read a ledger's state; empty if it does not exist. Raises LedgerError if it is damaged."""
    past = LedgerState()
    if ledger.exists():
        for line in read_ledger(ledger):
            past.apply(line)
    return past


def reinstate(past: LedgerState, group: str, record: Callable[[LedgerEntry], None]) -> None:
    """Make a rolled-back group and its attempts live again."""
    line = entry("group", "put_back", id=group)
    record(line)
    past.apply(line)


def cancel_lost(past: LedgerState, group: str, record: Callable[[LedgerEntry], None]) -> None:
    """End a group that was live when the trainer exited, its attempts first."""
    cancelled = State.CANCELLED
    why = "the processes that ran it ended"
    for name in past.live_attempts(group).values():
        past.attempts[name].state = cancelled
        record(
            entry(
                "attempt", "ended", id=name, state=cancelled.value, outcome=Outcome.CANCELLED.value, why=why
            )
        )
    past.groups[group].state = cancelled
    record(entry("group", "ended", id=group, state=cancelled.value, why=why))

"""Going on after a crash or a stop: what the ledger says, and what has to be put right in it.

The checkpoint's marker is the only commit point. Groups stepped on behind it are taken back: their step is
lost, so they are live again, with the tokens that `trajectories/` keeps of them, and end once more. Versions
behind the marker are an abandoned lineage: no token of theirs is trained on, and the restored weights are
published under a number never used before. What ran when the processes died ends `cancelled`, and its tasks
are issued again.
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
    """A group or an attempt, as the entries so far tell it."""

    issued: LedgerEntry
    state: State = State.LIVE
    ended_at: int = -1
    """`seq` of its ending."""
    outcome: str | None = None
    taken_back: bool = False
    """It ended `stepped` behind the marker that a later start went on from, and was not put back yet."""

    @property
    def final(self) -> State:
        """Where it stands for a run that has left abandoned lineages behind and committed the rest."""
        return State.TRAINED if self.state is State.STEPPED and not self.taken_back else self.state


@dataclass(slots=True)
class LedgerState:
    """What an existing ledger tells. A run without one has an empty past."""

    epoch: int = 0
    groups: dict[str, LedgerItem] = field(default_factory=dict)
    attempts: dict[str, LedgerItem] = field(default_factory=dict)
    abandoned: set[int] = field(default_factory=set)
    """Versions of lineages that were left behind."""
    quarantined: set[str] = field(default_factory=set)
    """Tasks that are to blame themselves; older ledgers have others, given up in an outage."""
    _versions: list[tuple[int, int]] = field(default_factory=list)
    """(`seq` of the entry, version) of everything published."""
    _members: dict[str, list[str]] = field(default_factory=dict)

    @property
    def highest_version(self) -> int:
        return max((version for _, version in self._versions), default=-1)

    def read(self, one: LedgerEntry) -> None:
        """Take in the next entry."""
        if one["kind"] == "run":
            self._read_run(one)
            return
        items = self.groups if one["kind"] == "group" else self.attempts
        if one["event"] == "issued":
            items[one["id"]] = LedgerItem(one)
            if one["kind"] == "attempt":
                self._members.setdefault(one["group"], []).append(one["id"])
        elif one["event"] == "put_back":
            for known in self._with_members(one["id"]):
                if known.state is State.STEPPED:
                    known.state, known.taken_back = State.LIVE, False
        else:
            known = items[one["id"]]
            known.state, known.ended_at, known.outcome = State(one["state"]), one["seq"], one.get("outcome")

    def _read_run(self, one: LedgerEntry) -> None:
        self.epoch = max(self.epoch, one.get("epoch") or 0)
        if one["event"] == "started":
            self.abandon(one.get("position") or 0)
        if one["event"] == "quarantined" and one.get("outcome") != Outcome.INFRA_ERROR:
            self.quarantined.add(one["task"])
        if one["event"] == "lifted":
            self.quarantined.discard(one["task"])
        if one["event"] in ("started", "publishing"):
            self._versions.append((one["seq"], one["version"]))

    def abandon(self, position: int) -> None:
        """A run goes on from the marker at `position`: what was stepped on or published behind it is lost.

        The version that a run begins with, entered first of all, stands even where there is no marker.
        """
        self.abandoned |= {version for seq, version in self._versions if seq >= max(1, position)}
        for items in (self.groups, self.attempts):
            for known in items.values():
                known.taken_back |= known.state is State.STEPPED and known.ended_at >= position

    def _with_members(self, group: str) -> list[LedgerItem]:
        return [self.groups[group], *(self.attempts[name] for name in self._members.get(group, []))]

    def taken_back(self) -> list[str]:
        """The groups to put back, in the order in which they were stepped on. The entries of one whose
        attempts alone were entered were cut short by the crash."""
        found = {
            name: max(known.ended_at for known in self._with_members(name))
            for name in self.groups
            if any(known.taken_back for known in self._with_members(name))
        }
        return sorted(found, key=found.__getitem__)

    def live(self) -> list[str]:
        """The groups that have not ended."""
        return [name for name, known in self.groups.items() if known.state is State.LIVE]

    def live_attempts(self, group: str) -> dict[int, str]:
        """A group's attempts that have not ended, by slot. Once it was sealed they are what it is made of."""
        members = self._members.get(group, [])
        return {
            self.attempts[name].issued["slot"]: name
            for name in members
            if self.attempts[name].state is State.LIVE
        }

    def counts(self, items: Mapping[str, LedgerItem]) -> Counter[State]:
        """By state. What stands of what was stepped on is trained."""
        return Counter(known.final for known in items.values())


def read_ledger_state(ledger: Path) -> LedgerState:
    """Fold a ledger; an absent one gives an empty past. Raises LedgerError on a damaged one."""
    past = LedgerState()
    if not ledger.exists():
        return past
    for one in read_ledger(ledger):
        past.read(one)
    return past


def reinstate(past: LedgerState, group: str, book: Callable[[LedgerEntry], None]) -> None:
    """What was stepped on with the group is live again."""
    one = entry("group", "put_back", id=group)
    book(one)
    past.read(one)


def cancel_lost(past: LedgerState, group: str, book: Callable[[LedgerEntry], None]) -> None:
    """End a group that was live when the run died, its attempts first."""
    cancelled = State.CANCELLED
    why = "the processes that ran it ended"
    for name in past.live_attempts(group).values():
        past.attempts[name].state = cancelled
        book(
            entry(
                "attempt", "ended", id=name, state=cancelled.value, outcome=Outcome.CANCELLED.value, why=why
            )
        )
    past.groups[group].state = cancelled
    book(entry("group", "ended", id=group, state=cancelled.value, why=why))

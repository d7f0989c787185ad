"""State of a run, read from its ledger, and the entries that repair it after a crash or a stop.

A checkpoint's marker is the only commit point. Groups trained on after it are restored: their step is
discarded, so they are live again, with their tokens from `trajectories/`, and end once more. Versions
published after the marker are abandoned: their tokens are not trained on, and the restored weights are
published under a new number. Groups that ran when the processes exited end `cancelled`, and their tasks are
issued again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from tidegate.errors import LedgerError
from tidegate.trainer.ledger.entries import LedgerEntry, State, entry, failure_cause
from tidegate.trainer.ledger.ledger import read_ledger
from tidegate.types import Outcome


@dataclass(slots=True)
class LedgerItem:
    """State of a group or an attempt after the entries so far."""

    issued: LedgerEntry
    state: State = State.LIVE
    end: LedgerEntry = field(default_factory=LedgerEntry)
    """The entry of its end; empty while it is live."""
    steps_taken: int = 0
    """Steps of the run when it ended, including its own."""
    discarded: bool = False
    """It ended `stepped` after the marker that a later start resumed from, and is not restored yet."""

    @property
    def ended_at(self) -> int:
        """`seq` of the entry of its end; −1 while it is live."""
        return self.end.get("seq", -1)

    @property
    def cause(self) -> str | None:
        """Cause of an attempt's failure (`failure_cause`); None if it did not fail."""
        end, outcome = self.end, self.end.get("outcome")
        failed = self.state is State.FAILED and outcome not in (Outcome.COMPLETED, Outcome.TRUNCATED)
        if outcome is None or not (failed or end.get("lost")):
            return None
        return failure_cause(outcome, spared=end.get("spared", False), slow=end.get("slow", False))

    def final(self, committed: float = math.inf) -> State:
        """Return the state if the newest checkpoint's marker is at the ledger's position `committed`."""
        trained = self.state is State.STEPPED and self.ended_at < committed and not self.discarded
        return State.TRAINED if trained else self.state


@dataclass(slots=True)
class LedgerState:
    """State of a run after all entries of its ledger; empty for a new run."""

    epoch: int = 0
    groups: dict[str, LedgerItem] = field(default_factory=dict)
    attempts: dict[str, LedgerItem] = field(default_factory=dict)
    abandoned: set[int] = field(default_factory=set)
    """Versions that were rolled back, or published after a marker that a later start resumed from."""
    quarantines: dict[str, LedgerEntry] = field(default_factory=dict)
    """The entry of each quarantined task."""
    publishes: list[LedgerEntry] = field(default_factory=list)
    """The entries of starts and publishes; each has a version."""
    end: LedgerEntry | None = None
    """The run's end; None while it runs, or if it was killed."""
    roll_backs: list[LedgerEntry] = field(default_factory=list)
    """The roll-backs of the policy that no resume has undone."""
    _: KW_ONLY
    version_lines: list[LedgerEntry] = field(default_factory=list)
    """All entries about versions, for `version_records`."""
    erased: set[str] = field(default_factory=set)
    """Groups whose clients had their texts and tokens deleted."""
    _members: dict[str, list[str]] = field(default_factory=dict)
    _steps: int = 0
    """Steps taken so far."""

    @property
    def highest_version(self) -> int:
        return max((line["version"] for line in self.publishes), default=-1)

    @property
    def quarantined(self) -> set[str]:
        """Tasks quarantined for failures charged to them; older ledgers also have some of an outage."""
        infra = Outcome.INFRA_ERROR
        return {task for task, line in self.quarantines.items() if line.get("outcome") != infra}

    def apply(self, line: LedgerEntry) -> None:
        """Update the state with the next entry."""
        if line["kind"] == "run":
            self._apply_run(line)
            return
        items = self.groups if line["kind"] == "group" else self.attempts
        if line["event"] == "issued":
            if line["kind"] == "attempt":
                self._members.setdefault(line["group"], []).append(line["id"])
            items[line["id"]] = LedgerItem(line)
        elif line["event"] == "put_back":
            for item in [self.groups[line["id"]], *self.members(line["id"]).values()]:
                if item.state is State.STEPPED:
                    item.state, item.end, item.discarded = State.LIVE, {}, False
        else:
            self._steps = line.get("step", self._steps)
            item = items[line["id"]]
            item.state, item.end, item.steps_taken = State(line["state"]), line, self._steps

    def _apply_run(self, line: LedgerEntry) -> None:
        self.epoch = max(self.epoch, line.get("epoch") or 0)
        event = line["event"]
        if event == "started":
            self.discard_after(line.get("position") or 0)
            self._steps = line.get("step", 0)
        if event == "quarantined":
            self.quarantines[line["task"]] = line
        if event == "lifted":
            self.quarantines.pop(line["task"], None)
        if event == "rolled_back":
            self.roll_backs.append(line)
            self.abandoned |= set(range(line["to"] + 1, line["version"] + 1))
        if event == "erased":
            self.erased.add(line["group"])
        if event in ("started", "publishing"):
            self.publishes.append(line)
        if event in ("started", "publishing", "promoted", "rolled_back", "ended"):
            self.version_lines.append(line)
        if event in ("started", "ended"):
            self.end = line if event == "ended" else None

    def discard_after(self, position: int) -> None:
        """Discard steps and abandon versions after `position`, that of the marker that a run resumes from.

        The run's first version, in the first entry, stays valid even without a marker, and so does the first
        version of each start from this marker, whose weights are the marker's.
        """
        for item in [*self.groups.values(), *self.attempts.values()]:
            item.discarded |= item.state is State.STEPPED and item.ended_at >= position
        self.abandoned |= {
            line["version"]
            for line in self.publishes
            if line["seq"] >= max(1, position) and not has_weights_of_marker(line, position)
        }
        self.roll_backs = [line for line in self.roll_backs if line["seq"] < position]

    def members(self, group: str) -> dict[str, LedgerItem]:
        """Return a group's attempts by id."""
        return {name: self.attempts[name] for name in self._members.get(group, [])}

    def discarded_groups(self) -> list[str]:
        """Return the groups to restore, in the order in which they were trained on.

        A crash between two entries may leave a group whose attempts ended and which has not.
        """
        ended_at = {}
        for name, group in self.groups.items():
            items = [group, *self.members(name).values()]
            if any(item.discarded for item in items):
                ended_at[name] = max(item.ended_at for item in items)
        return sorted(ended_at, key=ended_at.__getitem__)

    def live(self) -> list[str]:
        """Return the groups that have not ended."""
        return [name for name, group in self.groups.items() if group.state is State.LIVE]

    def live_attempts(self, group: str) -> dict[int, str]:
        """Return a group's live attempts by slot. Those of a sealed group are its successful ones."""
        members = self.members(group).items()
        return {item.issued["slot"]: name for name, item in members if item.state is State.LIVE}

    def is_ending(self, group: str) -> bool:
        """Whether a crash between the entries of a live group's end left it with attempts that have ended.

        They were successful: others fail, or are cancelled as their worker was lost.
        """
        return any(
            item.state in (State.STALE, State.FILTERED)
            or (item.state is State.CANCELLED and not item.end.get("lost"))
            for item in self.members(group).values()
        )

    def failures(self) -> Counter[str]:
        """Count the failed attempts by cause."""
        return Counter(cause for item in self.attempts.values() if (cause := item.cause) is not None)

    def counts(self, items: Mapping[str, LedgerItem], committed: float = math.inf) -> Counter[State]:
        """Count items by their final state, if the newest marker is at the position `committed`."""
        return Counter(item.final(committed) for item in items.values())


def has_weights_of_marker(line: LedgerEntry, position: int) -> bool:
    """Whether the version of an entry has the weights of the marker at `position`: of a start from there."""
    return line["event"] == "started" and (line.get("position") or 0) == position


def read_ledger_state(ledger: Path) -> LedgerState:
    """Read a ledger's state. Raises LedgerError if it does not exist or is damaged."""
    past = LedgerState()
    for number, line in enumerate(read_ledger(ledger), start=1):
        try:
            past.apply(line)
        except KeyError as error:
            why = f"{error} was not issued before it, or is missing in it"
            raise LedgerError(f"{ledger}, line {number} is damaged: {why}") from error
        except (TypeError, ValueError) as error:
            raise LedgerError(f"{ledger}, line {number} is damaged: {error}") from error
    return past


def restore_group(past: LedgerState, group: str, record: Callable[[LedgerEntry], None]) -> None:
    """Make a group of a discarded step and its attempts live again."""
    line = entry("group", "put_back", id=group)
    record(line)
    past.apply(line)


def cancel_interrupted(past: LedgerState, group: str, record: Callable[[LedgerEntry], None]) -> None:
    """End a group that was live when the trainer exited, its attempts first."""
    end = {"state": State.CANCELLED.value, "why": "the processes that ran it ended"}
    attempts = past.live_attempts(group).values()
    lines = [entry("attempt", "ended", id=id, outcome=Outcome.CANCELLED.value, **end) for id in attempts]
    for line in [*lines, entry("group", "ended", id=group, **end)]:
        record(line)
        past.apply(line)

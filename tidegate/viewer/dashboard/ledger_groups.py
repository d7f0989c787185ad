"""Details of single groups and of the run from the ledger, in addition to the counts by state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tidegate.viewer.formatting import printable

LOST = ("failed", "cancelled")


@dataclass(slots=True)
class LostAttempt:
    id: str
    slot: int | None
    state: str
    outcome: str
    why: str


@dataclass(slots=True)
class GroupEntry:
    """A group in the ledger; `version` is the trainer's version at its issue."""

    task: str
    version: int | None = None
    replaces: str = ""
    replaced_by: str = ""
    step: int | None = None
    staleness: int | None = None
    oldest: int | None = None
    lost: list[LostAttempt] = field(default_factory=list)

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class Quarantined:
    task: str
    group: str
    outcome: str
    why: str


class LedgerGroups:
    """Processes the ledger entry by entry. Keeps lost attempts only; the others are in the trajectory
    files."""

    def __init__(self) -> None:
        self.groups: dict[str, GroupEntry] = {}
        self.quarantined: list[Quarantined] = []
        self.ended: str | None = None
        """Why the run ended; empty if it was completed, None while it runs."""
        self.version: int | None = None
        self._slots: dict[str, tuple[str, int | None]] = {}

    def enter(self, entry: Mapping[str, Any]) -> None:
        kind, event = entry.get("kind"), entry.get("event")
        name = str(entry.get("id"))
        if kind == "run":
            self._run(event, entry)
        elif kind == "group" and event == "issued":
            self._issue(name, entry)
        elif kind == "group" and event == "ended" and name in self.groups:
            group = self.groups[name]
            group.step, group.staleness = _integer(entry.get("step")), _integer(entry.get("staleness"))
            group.oldest = _integer(entry.get("oldest"))
        elif kind == "group" and event == "put_back" and name in self.groups:
            group = self.groups[name]
            group.step = group.staleness = group.oldest = None
        elif kind == "attempt" and event == "issued":
            self._slots[name] = (str(entry.get("group")), _integer(entry.get("slot")))
        elif kind == "attempt" and event == "ended":
            self._end_attempt(name, entry)

    def _run(self, event: object, entry: Mapping[str, Any]) -> None:
        if event == "started":
            self.ended = None
            self.version = _integer(entry.get("version"))
        elif event == "ended":
            self.ended = printable(entry.get("why") or "")
        elif event == "publishing":
            self.version = _integer(entry.get("version"))
        elif event == "quarantined":
            words = (printable(entry.get(key) or "") for key in ("task", "group", "outcome", "why"))
            self.quarantined.append(Quarantined(*words))
        elif event == "lifted":
            lifted = printable(entry.get("task") or "")
            self.quarantined = [task for task in self.quarantined if task.task != lifted]

    def _issue(self, name: str, entry: Mapping[str, Any]) -> None:
        replaces = str(entry.get("replaces") or "")
        task = printable(entry.get("task") or "")
        self.groups[name] = GroupEntry(task, _integer(entry.get("version")), printable(replaces))
        if replaces in self.groups:
            self.groups[replaces].replaced_by = printable(name)

    def _end_attempt(self, name: str, entry: Mapping[str, Any]) -> None:
        group, slot = self._slots.pop(name, ("", None))
        if entry.get("state") in LOST and group in self.groups:
            words = (printable(entry.get(key) or "") for key in ("state", "outcome", "why"))
            self.groups[group].lost.append(LostAttempt(printable(name), slot, *words))


def _integer(value: object) -> int | None:
    return value if type(value) is int else None

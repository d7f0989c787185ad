"""What the ledger holds: one entry per line, and the states in which slot attempts and groups end."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal, TypedDict, cast


class State(StrEnum):
    """Where a slot attempt or a group stands. All but `live` and `stepped` are final.

    `stepped` becomes `trained` when a checkpoint's marker is written behind it; nothing else is
    entered then, because the marker alone is the commit point. A resume from a marker before it puts it
    back: it is live again, and ends once more.
    """

    LIVE = "live"
    TRAINED = "trained"
    STEPPED = "stepped"
    STALE = "stale"
    FILTERED = "filtered"
    FAILED = "failed"
    CANCELLED = "cancelled"


FINAL = tuple(state for state in State if state is not State.LIVE)

Kind = Literal["group", "attempt", "run"]


class LedgerEntry(TypedDict, total=False):
    """One line of `ledger.jsonl`. The ledger adds `seq` and `time`.

    * group issued: `task`, `index` (its place in the training split), `version`, `replaces`
    * group ended: `state`, for `stepped` also `step`, `version`, `oldest`, `staleness`, and for `stale`
      `version` (against which it was too stale), `oldest`, `newest`, `staleness`
    * attempt issued: `group`, `slot`, `number` (1 for a slot's first)
    * attempt ended: `state`, `outcome`, `why`, and `spared` where a failure in an outage is charged to nobody
    * group put_back: a resume undid its step; it and the attempts that ended `stepped` with it are live again
    * run quarantined / lifted: `task`, and why
    * run paused / resumed: `why`; an outage begins and ends, no group starts meanwhile
    * run started / publishing / ended: `epoch`, `step`, `version`, `why`; of a started run also `position`
      where it resumes (the ledger's position in the marker it goes on from), and the `rules` that hold from
      there on: a run may be resumed with other ones
    """

    seq: int
    time: float
    kind: Kind
    event: Literal[
        "issued", "ended", "put_back", "started", "publishing", "quarantined", "lifted", "paused", "resumed"
    ]
    id: str
    state: str
    task: str
    index: int
    version: int
    replaces: str | None
    step: int
    oldest: int | None
    newest: int | None
    staleness: int | None
    group: str
    slot: int
    number: int
    outcome: str | None
    why: str | None
    spared: bool
    epoch: int
    position: int | None
    rules: dict[str, Any]


def entry(kind: Kind, event: Any, **fields: Any) -> LedgerEntry:
    return cast(LedgerEntry, {"kind": kind, "event": event, **fields})

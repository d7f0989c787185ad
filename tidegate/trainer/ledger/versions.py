"""Policy versions of a run, from its ledger."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass

from tidegate.trainer.ledger.entries import LedgerEntry


@dataclass(slots=True)
class VersionRecord:
    """A policy version and its state.

    Attributes:
        step: Step after which it was written.
        time: Unix time of its first entry.
        state: `live`, `superseded` by a later one, `in test`, `not tested` to the end, `rolled back`, or
            `abandoned` by a resume from an earlier checkpoint.
        why: Result of its test; None without one.
        reward, live_reward: Mean rewards in the test, of it and of the version that was live.
        episodes, live_episodes: Number of these rewards.
    """

    version: int
    step: int
    time: float
    state: str
    _: KW_ONLY
    why: str | None = None
    reward: float | None = None
    live_reward: float | None = None
    episodes: int | None = None
    live_episodes: int | None = None
    seq: int = 0
    marker: int | None = None
    """Ledger position of the checkpoint whose weights it has: that of a start."""


def version_records(lines: Iterable[LedgerEntry]) -> list[VersionRecord]:
    """Return the versions in the order of their numbers."""
    records: dict[int, VersionRecord] = {}
    for line in lines:
        if line["kind"] == "run":
            _apply(records, line)
    return [records[version] for version in sorted(records)]


def _apply(records: dict[int, VersionRecord], line: LedgerEntry) -> None:
    event = line["event"]
    if event == "started":
        for record in records.values():
            position = line.get("position") or 0
            # Entry 0 has the run's first version, whose weights are the base model's, without any marker.
            if record.seq >= max(1, position) and record.marker != position:
                record.state = "abandoned"
    if event in ("started", "ended"):
        for record in records.values():
            record.state = "not tested" if record.state == "in test" else record.state
    if event in ("started", "publishing"):
        tested = line.get("candidate", False)
        if not tested:
            _supersede(records)
        state = "in test" if tested else "live"
        records[line["version"]] = VersionRecord(
            line["version"], line["step"], line["time"], state, seq=line["seq"],
            marker=(line.get("position") or 0) if event == "started" else None,
        )  # fmt: skip
    elif event == "promoted":
        _supersede(records)
        _decide(records[line["version"]], "live", line)
    elif event == "rolled_back":
        for version, record in records.items():
            if line["to"] < version <= line["version"] and record.state != "abandoned":
                record.state = "rolled back"
        _decide(records[line["version"]], "rolled back", line)
        if line["to"] in records:
            _supersede(records)
            records[line["to"]].state = "live"


def _supersede(records: dict[int, VersionRecord]) -> None:
    live = next((record for record in reversed(records.values()) if record.state == "live"), None)
    if live is not None:  # there is never more than one
        live.state = "superseded"


def _decide(record: VersionRecord, state: str, line: LedgerEntry) -> None:
    record.state, record.why = state, line.get("why")
    record.reward, record.live_reward = line.get("reward"), line.get("live_reward")
    record.episodes, record.live_episodes = line.get("episodes"), line.get("live_episodes")

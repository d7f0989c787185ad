"""Data of the page of a standing service."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from fastapi import Query

from tidegate.trainer.ledger.entries import State
from tidegate.viewer.dashboard.records import EpisodeSummary, NotFound
from tidegate.viewer.dashboard.run import FollowedRun
from tidegate.viewer.formatting import as_mapping, known, mappings, printable

Wire = dict[str, Any]
LONGEST_TEXT = 2_000
MOST_LOOKED_AT = 200
"""Groups with comments or corrections that are looked for in the trajectories of their steps."""


def service(run: FollowedRun) -> Wire:
    """Returns the groups, conversations and feedback of clients, with their ends."""
    found: Wire = run.cached("service", lambda: run.service().to_wire())
    if found["gate"] is None:
        return found
    return {**found, "gate": {**found["gate"], "waited_s": run.service().waited_s()}}


def notes(run: FollowedRun, most: Annotated[int, Query(ge=1, le=100)] = 20) -> Wire:
    """Returns the newest comments and corrections whose conversations are in the run's trajectories."""
    run.refresh()
    with run.lock:
        groups = run.clients.noted[: -MOST_LOOKED_AT - 1 : -1]
        ends = _ends_of_steps(run)
        steps = {group: _steps_of(run, group, ends) for group in groups}
    found: list[Wire] = []
    for group in groups:
        for step in steps[group]:
            try:
                members = run.records.file("step", step).group(group)
            except NotFound:  # dropped for another step, or erased
                continue
            found += [note for member in members for note in _notes_of(run, step, member)]
            break
        if len(found) >= most:
            break
    return {"notes": found[:most]}


def _ends_of_steps(run: FollowedRun) -> list[tuple[int, int]]:
    """Returns for each step the place in the ledger where it was recorded, in order."""
    ends: dict[int, int] = {}
    for item in run.ledger.groups.values():
        if item.state is State.STEPPED and item.step is not None:
            ends[item.step] = max(ends.get(item.step, -1), item.ended_at)
    return sorted((at, step) for step, at in ends.items())


def _steps_of(run: FollowedRun, group: str, ends: list[tuple[int, int]]) -> list[int]:
    """Returns the steps in whose files a group may be: its own, or those around the place where it ended."""
    item = run.ledger.groups.get(group)
    if item is None or item.state is State.LIVE:
        return []
    if item.step is not None:
        return [item.step]
    at = bisect.bisect_left(ends, (item.ended_at, -1))
    return [step for _, step in ends[max(0, at - 1) : at + 1]][::-1]


def _notes_of(run: FollowedRun, step: int, member: EpisodeSummary) -> Iterator[Wire]:
    summary, record = run.records.read("step", step, member.line)
    metadata = as_mapping(record.get("metadata"))
    received = {str(one.get("name")): one.get("value") for one in mappings(metadata.get("received"))}
    for key, note in as_mapping(metadata.get("feedback")).items():
        turn, _, name = str(key).partition(".")
        if isinstance(note, Mapping):
            yield {
                "step": step,
                "line": summary.line,
                "group": summary.group,
                "state": run.state_of(summary),
                "turn": int(turn) if turn.isdecimal() else None,
                "name": printable(name)[:200],
                "value": known(received.get(name)),
                "comment": _text(note.get("comment")),
                "correction": _text(_newest(note.get("correction"))),
            }


def _newest(messages: object) -> object:
    """Returns the text of the reply at the end of a corrected conversation."""
    chat = mappings(messages)
    return chat[-1].get("content") if chat else None


def _text(value: object) -> str | None:
    return printable(value)[:LONGEST_TEXT] if isinstance(value, str) else None

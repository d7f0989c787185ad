"""The page of a standing service: tables and charts of its clients, for the dashboard and the report."""

from __future__ import annotations

import bisect
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import numpy as np
from fastapi import Query

from tidegate.trainer.ledger.entries import State
from tidegate.trainer.ledger.state import LedgerItem, LedgerState
from tidegate.trainer.ledger.versions import VersionRecord, version_records
from tidegate.viewer.chart import STEP, Chart, Series, lines
from tidegate.viewer.clients.records import REFUSED, TAKEN, ClientRecords, NamedReward
from tidegate.viewer.clients.running_mean import RunningMean
from tidegate.viewer.dashboard.records import EpisodeSummary, NotFound
from tidegate.viewer.dashboard.run import FollowedRun
from tidegate.viewer.formatting import as_mapping, known, mappings, printable

Wire = dict[str, Any]
LONGEST_TEXT = 2_000
MOST_LOOKED_AT = 200
"""Groups with comments or corrections that are looked for in the trajectories of their steps."""
COLUMNS = ("trained", "waiting", "filtered", "stale", "unrewarded", "refused", "cancelled", "failed")
"""What became of conversations and groups; each is in one of them."""
ALWAYS = ("trained", "unrewarded", "refused", "stale")
"""Columns that are shown although they are empty."""
_COLUMN = {
    State.TRAINED: "trained", State.STEPPED: "trained", State.LIVE: "waiting", State.FILTERED: "filtered",
    State.STALE: "stale", State.CANCELLED: "cancelled",
}  # fmt: skip
MOST_VERSIONS = 100
MOST_SHOWN = 50
MOST_REASONS = 8


def service(run: FollowedRun) -> Wire:
    """Returns the groups, conversations and feedback of clients, with their ends. All texts are safe to
    print."""
    found: Wire = run.cached("service", lambda: _collect(run))
    if found["gate"] is None:
        return found
    since: float | None = run.cached("publish_wait", lambda: _publish_waits_since(run))
    waited_s = None if since is None else max(0.0, time.time() - since)
    return {**found, "gate": {**found["gate"], "waited_s": waited_s}}


def _collect(run: FollowedRun) -> Wire:
    records, versions = run.clients, versions_of(run.ledger)
    counts = ends_by_key(run.ledger, run.committed, records)
    total = sum(counts.values(), Counter())
    columns = [name for name in COLUMNS if total[name] or name in ALWAYS]
    return {
        "columns": columns,
        "total": _key_row("", total, RunningMean.of(records.rewards.values()), columns),
        "keys": [
            _key_row(key, counts[key], records.rewards.get(key, RunningMean()), columns)
            for key in sorted(counts)
        ],
        "refusals": records.refusals.most_common(MOST_REASONS),
        "erased": len(run.ledger.erased),
        "feedback": feedback_rows(records.named),
        "names": len(records.named),
        "comments": records.comments,
        "corrections": records.corrections,
        "versions": version_rows(versions, records.versions),
        "older": max(0, len(versions) - MOST_VERSIONS),
        "mixed": records.mixed.to_wire(),
        "rewards_chart": reward_chart(versions, records.versions),
        "gate": _gate(run),
        "promotion": _promotion(run, versions),
    }


def versions_of(ledger: LedgerState) -> list[VersionRecord]:
    """Returns the versions in the order of their numbers; none if an entry is damaged."""
    try:
        return version_records(ledger.version_lines)
    except (KeyError, TypeError):
        return []


def publish_waits_since(ledger: LedgerState, trainer: Mapping[str, Any]) -> float | None:
    """Returns since when (Unix time) a publish waits for conversations; None if none does.

    Args:
        ledger: The run's ledger.
        trainer: The run's settings in the section `trainer`.
    """
    last = max((line.get("seq", -1) for line in ledger.version_lines), default=-1)
    groups = ledger.groups.values()
    ends = [group.end for group in groups if group.state is State.STEPPED and group.ended_at > last]
    step, since = max(((end.get("step", 0), end.get("time", 0.0)) for end in ends), default=(0, 0.0))
    interval = trainer.get("publish_interval", 1)
    due = isinstance(interval, int) and interval > 0
    due = due and (step % interval == 0 or step == trainer.get("steps"))
    return since if trainer.get("max_stale_share") is not None and step > 0 and due else None


def _publish_waits_since(run: FollowedRun) -> float | None:
    try:
        return publish_waits_since(run.ledger, as_mapping(run.files.settings.get("trainer")))
    except (TypeError, ValueError):
        return None  # an entry is damaged


def _gate(run: FollowedRun) -> Wire | None:
    """Returns the waits before publishes; None if no publish may wait."""
    trainer = as_mapping(run.files.settings.get("trainer"))
    if trainer.get("max_stale_share") is None:
        return None
    waits = run.files.series("time/publish_gate")
    seconds = [value for _, value in waits]
    note = "How long the publish after a step waited for open conversations."
    axes = (STEP, "seconds")
    return {
        "share": trainer.get("max_stale_share"),
        "limit_s": known(trainer.get("gate_timeout_s")),
        "publishes": len(waits),
        "waited": sum(value >= 1.0 for value in seconds),
        "mean": float(np.mean(seconds)) if seconds else None,
        "largest": max(seconds, default=None),
        "chart": lines(
            "Waits before publishes", [Series("wait", waits)], note=note, axes=axes, y_range=(0.0, None),
            size=(960, 220),
        ),
    }  # fmt: skip


def _promotion(run: FollowedRun, versions: Sequence[VersionRecord]) -> Wire | None:
    """Returns the tests of versions; None if the run has none and was not rolled back."""
    settings = as_mapping(as_mapping(run.files.settings.get("trainer")).get("promotion"))
    mode = printable(settings.get("mode") or "always")
    tested = [record for record in versions if record.why is not None]
    if mode == "always" and not tested:
        return None
    running = next((record.version for record in versions if record.state == "in test"), None)
    return {
        "mode": mode,
        "margin": known(settings.get("margin")),
        "promoted": sum(record.state in ("live", "superseded") for record in tested),
        "rolled_back": sum(record.state == "rolled back" for record in versions),
        "in_test": running,
        "test": None if running is None else _test_row(run, running),
    }


def _test_row(run: FollowedRun, version: int) -> Wire | None:
    """Returns the state of the test of a version, from `canary.json`; None if that is of another one."""
    try:
        test = as_mapping(json.loads((run.dir / "canary.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None
    names = ("reward", "live_reward", "episodes", "live_episodes", "low", "high", "margin", "least")
    return {name: known(test.get(name)) for name in names} if test.get("version") == version else None


def ends_by_key(ledger: LedgerState, committed: int, records: ClientRecords) -> dict[str, Counter[str]]:
    """Returns the number of each project key's groups and conversations by their end, by COLUMNS.

    The ledger decides on those that it has.
    """
    ends = Counter((item.issued.get("client"), _column(item, committed)) for item in ledger.groups.values())
    others = {TAKEN: "waiting", REFUSED: "refused", "unrewarded": "unrewarded"}
    ends.update(
        (client, others.get(state, "failed"))
        for group, (client, state) in records.groups.items()
        if group not in ledger.groups
    )
    counts: dict[str, Counter[str]] = {}
    for (client, column), count in ends.items():
        if isinstance(client, str):
            counts.setdefault(client, Counter())[column] += count
    return counts


def _column(item: LedgerItem, committed: int) -> str:
    state = State.LIVE if item.discarded else item.final(committed)
    return _COLUMN.get(state, "failed")


def _key_row(name: str, counts: Counter[str], rewards: RunningMean, columns: Sequence[str]) -> Wire:
    ends = [counts[column] for column in columns]
    return {"name": printable(name), "count": counts.total(), "ends": ends, "reward": rewards.to_wire()}


def feedback_rows(named: Mapping[str, NamedReward]) -> list[Wire]:
    """Returns a row for each name of a reward, the most frequent first."""
    ordered = sorted(named.items(), key=lambda item: -item[1].values.count)
    return [
        {
            "name": printable(name),
            **reward.values.to_wire(),
            "least": reward.values.least,
            "largest": reward.values.largest,
            "delays": _quantiles(reward.delays),
        }
        for name, reward in ordered[:MOST_SHOWN]
    ]


def _quantiles(delays: Sequence[float]) -> list[float] | None:
    """Returns the median, the 90th percentile and the maximum; None without values."""
    if not len(delays):
        return None
    return [float(value) for value in np.quantile(np.asarray(delays), (0.5, 0.9, 1.0))]


def version_rows(versions: Sequence[VersionRecord], rewards: Mapping[int, RunningMean]) -> list[Wire]:
    """Returns the newest versions, the newest first: the rows of `tidegate versions list`, with rewards."""
    return [
        {
            **asdict(record),
            "why": None if record.why is None else printable(record.why),
            "rewards": rewards.get(record.version, RunningMean()).to_wire(),
        }
        for record in reversed(versions[-MOST_VERSIONS:])
    ]


def reward_chart(versions: Iterable[VersionRecord], rewards: Mapping[int, RunningMean]) -> Chart | None:
    """Returns the mean reward of each version with its interval, by the step that wrote the version.

    None for fewer than two versions.
    """
    newest = {record.step: rewards[record.version] for record in versions if record.version in rewards}
    if len(newest) < 2:
        return None
    points = [(float(step), newest[step]) for step in sorted(newest)]
    means = [(step, one.mean) for step, one in points]
    bounds = [(step, interval) for step, one in points if (interval := one.interval()) is not None]
    series = [
        Series("mean", means, "accent", "dots" if len(means) <= 40 else "line"),
        Series("95% interval, low", [(step, low) for step, (low, _) in bounds], "muted", "thin"),
        Series("high", [(step, high) for step, (_, high) in bounds], "muted", "thin"),
    ]
    values = [value for one in series for _, value in one.points]
    unit = (0.0, 1.0) if all(0.0 <= value <= 1.0 for value in values) else (None, None)
    note = "Episodes with all tokens of one version, by the step that wrote it."
    axes = (STEP, "mean reward")
    return lines("Reward by policy version", series, note=note, axes=axes, y_range=unit, size=(960, 280))


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
        if item.state is State.STEPPED and (step := item.end.get("step")) is not None:
            ends[step] = max(ends.get(step, -1), item.ended_at)
    return sorted((at, step) for step, at in ends.items())


def _steps_of(run: FollowedRun, group: str, ends: list[tuple[int, int]]) -> list[int]:
    """Returns the steps in whose files a group may be: its own, or those around the place where it ended."""
    item = run.ledger.groups.get(group)
    if item is None or item.state is State.LIVE:
        return []
    if (own := item.end.get("step")) is not None:
        return [own]
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

"""Data of the page's requests. All texts are safe to print, and only charts contain markup.

The parameters of a view after `run` are those of its request.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

from fastapi import Query

from tidegate.viewer.dashboard import curves, episode
from tidegate.viewer.dashboard.processes import log_tail, processes
from tidegate.viewer.dashboard.records import (
    IN_PARTS,
    EpisodeSummary,
    Kind,
    NotFound,
    RecordFile,
    in_batch_order,
    in_slot_order,
    part_of,
)
from tidegate.viewer.dashboard.run import FollowedRun, Number
from tidegate.viewer.dashboard.search import episodes
from tidegate.viewer.dashboard.service import notes, service
from tidegate.viewer.dashboard.statistics.distributions import distributions
from tidegate.viewer.dashboard.statistics.evaluations import compared, evaluations
from tidegate.viewer.dashboard.tasks import tasks
from tidegate.viewer.dashboard.timeline import timeline
from tidegate.viewer.formatting import printable
from tidegate.viewer.ledger import STATES, group_to_wire, quarantined, replaced_by
from tidegate.viewer.overview import (
    banners,
    opening,
    run_name,
    scores,
    shown_settings,
    staleness_bound,
    tiles,
)
from tidegate.viewer.plots import health_charts, main_charts, reward_chart
from tidegate.viewer.run_files import Row

Wire = dict[str, Any]
Most = Annotated[int, Query(ge=1, le=1000)]
Tokens = Annotated[int, Query(ge=1, le=20_000)]

MOST_PAST_SIGNS = 20
STARTING = (
    "The run is starting: its checks run, or its processes load. This page shows its records as soon as "
    "there are some."
)

STEP_COLUMNS = {
    "step": "step",
    "version": "version",
    "time": "time",
    "reward": "reward/mean",
    "staleness": "staleness/mean",
    "staleness_max": "staleness/max",
    "dropped": "selection/dropped_ratio",
    "waited": "time/wait_for_batch",
    "seconds": "time/step",
    "tokens": "tokens/trained",
    "length": "length/mean",
    "lag_kl": "lag_kl",
    "entropy": "entropy",
    "eval": "eval/reward",
}


def state(run: FollowedRun) -> Wire:
    """Returns the state that changes during a run, small enough to be polled every second or two."""
    stamp, ledger = run.refresh(), run.ledger
    publishes, end = ledger.publishes, ledger.end
    return {
        "name": run_name(run.files),
        "stamp": str(stamp),
        "step": run.files.last("step"),
        "planned": run.files.planned,
        "version": publishes[-1]["version"] if publishes else run.files.last("version"),
        "bound": staleness_bound(run.files.settings.get("trainer", {})),
        "status": run.status(),
        "why": None if end is None else printable(end.get("why") or ""),
        "silence": run.silence(),
        "failed": stamp.failed > 0,
        "service": run.files.by_clients,
    }


def overview(run: FollowedRun) -> Wire:
    wire: Wire = run.cached("overview", lambda: overview_of(run, progress=False))
    return wire


def overview_of(run: FollowedRun, *, progress: bool) -> Wire:
    """Returns the run at a glance; with `progress`, a remark on steps that are not taken yet."""
    files, counts = run.files, run.counts()
    bound = staleness_bound(files.settings.get("trainer", {}))
    return {
        "opening": STARTING if run.status() == "starting" else opening(files),
        "banners": [printable(text) for text in banners(files, counts, run.remarks(), progress=progress)],
        "signs": [held.to_wire() for held in run.signs.current.values()],
        "past_signs": [held.to_wire() for held in run.signs.past[-MOST_PAST_SIGNS:]],
        "scores": scores(files),
        "tiles": list(tiles(files, counts)),
        "reward": reward_chart(files),
        "charts": main_charts(files, bound),
        "health": health_charts(files),
        "books": None
        if counts is None
        else {
            "states": [[state, counts.groups[state], counts.attempts[state]] for state in STATES],
            "issued": [counts.groups.total(), counts.attempts.total()],
            "staleness": sorted(counts.staleness.items()),
            "outcomes": counts.outcomes.most_common(),
            "reasons": counts.reasons.most_common(8),
        },
        "quarantined": quarantined(run.ledger)[-50:],
    }


def metrics_of_run(run: FollowedRun) -> Wire:
    return {"metrics": curves.metrics([run])}


def curves_of_run(run: FollowedRun, key: curves.Keys, x: curves.Axis = "step") -> Wire:
    return curves.curves([run], key, x)


def steps(run: FollowedRun, before: Number | None = None, most: Most = 200) -> Wire:
    """Returns the steps below `before`, the newest first."""
    run.refresh()
    with run.lock:
        rows = run.files.rows
        end = len(rows) if before is None else _at(rows, before)
        shown = [row for row in reversed(rows[max(0, end - most) : end]) if row["step"] >= 1]
        more = bool(shown) and shown[-1]["step"] > 1 and end - most > 0
        columns = [{name: row.get(key) for name, key in STEP_COLUMNS.items()} for row in shown]
        return {"steps": columns, "more": more}


def _at(rows: Sequence[Row], step: int) -> int:
    """Returns the index of the first row that is not below a step."""
    return bisect.bisect_left(rows, float(step), key=lambda row: row["step"])


def step(run: FollowedRun, step: Number) -> Wire:
    """Returns a step's metrics and its neighbours; raises NotFound if the run has not taken it."""
    run.refresh()
    with run.lock:
        rows = run.files.rows
        at = _at(rows, step)
        row = rows[at] if at < len(rows) and rows[at]["step"] == step else None
        before = [int(row["step"]) for row in rows[max(0, at - 1) : at] if row["step"] >= 1]
        after = [int(row["step"]) for row in rows[at + (row is not None) :][:1]]
    written = step in run.records.numbers("step")
    if row is None and not written:
        raise NotFound(f"the run has not taken step {step}")
    return {
        "step": step,
        "metrics": row,
        "before": before[0] if before else None,
        "after": after[0] if after else None,
        "written": written,
    }


def groups(
    run: FollowedRun, step: Number, state: str | None = None, start: Number = 0, most: Most = 200
) -> Wire:
    """Returns a step's groups: those trained on, then those dropped while its batch was assembled."""
    run.refresh()
    file = run.records.file("step", step)
    counts: dict[str, int] = {}
    selected = []
    for group_id in in_batch_order(file):
        members = file.groups[group_id]
        ended = run.state_of(members[0])
        counts[ended] = counts.get(ended, 0) + 1
        if state in (None, ended):
            selected.append((group_id, ended, members))
    page = selected[start : start + most]
    return {
        "counts": counts,
        "total": len(selected),
        "groups": [_group_row(run, *group) for group in page],
        "episodes": len(file.summaries),
    }


def _group_row(run: FollowedRun, group_id: str, ended: str, members: Sequence[EpisodeSummary]) -> Wire:
    rewards = [member.reward for member in members if member.reward is not None]
    entry = group_to_wire(run.ledger, group_id) or {}
    return {
        "id": group_id,
        "task": members[0].task,
        "prompt": members[0].prompt,
        "state": ended,
        "members": [
            {"line": member.line, "slot": member.slot, "reward": member.reward, "outcome": member.outcome}
            for member in in_slot_order(members)
        ],
        "mean": statistics.fmean(rewards) if rewards else None,
        "tokens": statistics.fmean(member.tokens for member in members),
        "oldest": _least(member.oldest for member in members),
        "newest": max((member.newest for member in members if member.newest is not None), default=None),
        "finished": _finished(members),
        "staleness": entry.get("staleness"),
        "lost": len(entry.get("lost", ())),
        "replaces": entry.get("replaces", ""),
    }


def _finished(members: Sequence[EpisodeSummary]) -> float | None:
    """Returns the Unix time at which the last episode ended, if all have one."""
    ends = [one.started + (one.seconds or 0.0) for one in members if one.started is not None]
    return max(ends) if ends and len(ends) == len(members) else None


def _least(values: Iterable[int | None]) -> int | None:
    return min((value for value in values if value is not None), default=None)


def group(run: FollowedRun, id: str, step: Number = 0, kind: Literal["step", "stale"] = "step") -> Wire:
    """Returns a group with its members, its ledger entry and its neighbours in the file."""
    run.refresh()
    file = _file_of(run, id, step, kind)
    members = file.group(id)
    ended = run.state_of(members[0])
    names = in_batch_order(file)
    at = names.index(id)
    with run.lock:
        entry = group_to_wire(run.ledger, id)
        if entry is not None:
            entry["replaced_by"] = replaced_by(run.ledger, id)
    return {
        **_group_row(run, id, ended, members),
        "members": [member.to_wire() for member in members],
        "ledger": entry,
        "before": names[at - 1] if at else None,
        "after": names[at + 1] if at + 1 < len(names) else None,
    }


def _file_of(run: FollowedRun, group_id: str, step: int, kind: Kind) -> RecordFile:
    """Returns the file in which a group is looked for: of stale episodes, the newest part that has it."""
    numbers = (run.records.numbers(kind)[::-1] or [1]) if kind in IN_PARTS else [step]
    files = (run.records.file(kind, number) for number in numbers)
    return next((one for one in files if group_id in one.groups), None) or run.records.file(kind, numbers[0])


def one_episode(run: FollowedRun, kind: Kind, line: Number, step: Number = 0, budget: Tokens = 4000) -> Wire:
    run.refresh()
    summary, record = run.records.read(kind, step, line)
    return episode.episode_to_wire(summary, record, run.state_of(summary), run.texts, budget)


def more_tokens(
    run: FollowedRun,
    kind: Kind,
    line: Number,
    turn: Number,
    part: episode.Part,
    start: Number,
    step: Number = 0,
    most: Tokens = 2000,
) -> Wire:
    _, record = run.records.read(kind, step, line)
    return episode.tokens(episode.EpisodeTree(record), turn, part, run.texts, start, most)


def failures(run: FollowedRun, before: Number | None = None, most: Most = 100) -> Wire:
    """Returns the failed episodes before a line, newest first, and whether there are older ones."""
    run.refresh()
    found = list(itertools.islice(_failed(run, before), most + 1))
    with run.lock:
        counts, tasks = run.counts(), quarantined(run.ledger)
    return {
        "episodes": [episode.to_wire() for episode in found[:most]],
        "more": len(found) > most,
        "reasons": [] if counts is None else counts.reasons.most_common(20),
        "outcomes": [] if counts is None else counts.outcomes.most_common(),
        "quarantined": tasks,
    }


def _failed(run: FollowedRun, before: int | None) -> Iterator[EpisodeSummary]:
    """Yields the failed episodes before a line, newest first; reads only the parts that are needed."""
    for number in reversed(run.records.numbers("failed")):
        if before is None or number <= part_of(before):
            summaries = run.records.file("failed", number).summaries
            yield from (one for one in reversed(summaries) if before is None or one.line < before)


def settings(run: FollowedRun) -> Wire:
    return {
        "dir": printable(run.dir),
        "sections": [{"name": name, "rows": rows} for name, rows in shown_settings(run.files.settings)],
    }


VIEWS: dict[str, Callable[..., Wire]] = {
    "state": state, "overview": overview, "metrics": metrics_of_run, "curves": curves_of_run,
    "steps": steps, "step": step, "groups": groups, "group": group, "evaluations": evaluations,
    "compared": compared, "failures": failures, "settings": settings, "episode": one_episode,
    "episodes": episodes, "tasks": tasks, "timeline": timeline, "tokens": more_tokens,
    "service": service, "notes": notes, "distributions": distributions,
    "processes": processes, "log": log_tail,
}  # fmt: skip
"""The views by the last part of their path."""

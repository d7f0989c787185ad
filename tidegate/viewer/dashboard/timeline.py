"""Timeline of a few steps: trainer, publishes, calls of the engines, tools, and groups that wait."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from fastapi import Query

from tidegate.viewer.chart import rounded
from tidegate.viewer.dashboard.records import IN_PARTS, EpisodeSummary, Kind, NotFound, spans_of
from tidegate.viewer.dashboard.run import FollowedRun, Number
from tidegate.viewer.formatting import known, mappings, printable
from tidegate.viewer.run_files import Row

BINS = 240
LATER_STEPS = 8
"""Steps after the last one whose batches may have episodes of the window."""
MOST_EPISODES = 1500
"""Episodes that are read; of more, those in files of later steps are left out."""
MOST_BYTES = 200_000_000
MARGIN_S = 60.0
"""Time by which an episode's end, or the write of its record, may seem to precede its last call."""

PHASES = (
    ("time/wait_for_batch", "wait for groups"), ("time/teacher", "wait for teacher"),
    ("time/update", "update"), ("time/publish_gate", "publish gate"), ("time/publish", "publish"),
    ("time/promotion", "promotion"), ("eval/seconds", "evaluation"),
)  # fmt: skip
"""The phases of a step, in order."""

Span = Annotated[int, Query(ge=1, le=20)]
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class TimedCall:
    """A call of an engine, a tool or the rewards, in Unix seconds. One across a publish has two parts.

    Attributes:
        start: Start.
        end: End.
        version: Version whose tokens an engine sampled meanwhile; None if unknown, and for other calls.
        part: What was called.
        name: Name of the tool, or `rewards`; empty for an engine.
    """

    start: float
    end: float
    version: int | None
    part: Literal["engine", "tools", "rewards"]
    name: str


@dataclass(frozen=True, slots=True)
class TimedEpisode:
    """An episode from its first call to the end of its last one."""

    kind: Kind
    step: int
    summary: EpisodeSummary
    calls: list[TimedCall]

    @property
    def start(self) -> float:
        return min(call.start for call in self.calls)

    @property
    def end(self) -> float:
        return max(call.end for call in self.calls)


def timeline(run: FollowedRun, step: Number | None = None, span: Span = 3) -> dict[str, Any]:
    """Returns what happened during some steps, in seconds since the first of them began.

    Args:
        run: The run.
        step: The last step; by default the newest one.
        span: Number of steps.

    Raises:
        NotFound: The run has not taken the step, or its metrics have no times.
    """
    run.refresh()
    with run.lock:
        rows = [row for row in run.files.rows if row["step"] >= 1 and "time" in row and "time/step" in row]
        publishes = [line for line in run.ledger.publishes if line["event"] == "publishing"]
    at = next((index for index, row in enumerate(rows) if row["step"] == step), None)
    if step is None and rows:
        at = len(rows) - 1
    if at is None:
        raise NotFound(
            "no step has been taken yet" if step is None else f"the run has no times of step {step}"
        )
    shown = rows[max(0, at - span + 1) : at + 1]
    window = (shown[0]["time"] - shown[0]["time/step"], shown[-1]["time"])
    numbers = range(int(shown[0]["step"]), int(shown[-1]["step"]) + LATER_STEPS + 1)
    steps = [number for number in run.records.numbers("step") if number in numbers]
    published = {line["version"]: line["time"] for line in publishes if "time" in line}
    episodes, omitted = _episodes(run, shown, steps, window, published)
    return {
        "step": int(shown[-1]["step"]),
        "first": int(shown[0]["step"]),
        "before": int(rows[at - span]["step"]) if at >= span else None,
        "after": int(rows[min(len(rows) - 1, at + span)]["step"]) if at + 1 < len(rows) else None,
        "seconds": window[1] - window[0],
        "trainer": [phase for row in shown for phase in _phases(row, window[0])],
        "publishes": [
            {"at": line["time"] - window[0], "version": line["version"]}
            for line in publishes
            if window[0] <= line.get("time", 0.0) <= window[1]
        ],
        "load": _load(episodes, window),
        "waiting": _waiting(run, steps, rows, window),
        "episodes": [_to_wire(one, window[0]) for one in sorted(episodes, key=lambda one: one.start)],
        "omitted": omitted,
    }


def _phases(row: Row, origin: float) -> Iterator[dict[str, Any]]:
    """Yields the phases of a step; the rest of its time is `other`."""
    at, end = row["time"] - row["time/step"] - origin, row["time"] - origin
    beside = "eval/step" in row
    for key, name in PHASES:
        if (seconds := row.get(key, 0.0)) > 0 and not (beside and key == "eval/seconds"):
            yield {"name": name, "step": int(row["step"]), "start": at, "end": min(end, at + seconds)}
            at = min(end, at + seconds)
    if end - at > 0.01 * row["time/step"]:
        yield {"name": "other", "step": int(row["step"]), "start": at, "end": end}


def _episodes(
    run: FollowedRun,
    shown: Sequence[Row],
    steps: Sequence[int],
    window: Interval,
    published: Mapping[int, float],
) -> tuple[list[TimedEpisode], int]:
    """Returns the episodes with a call in the window, and the number of those that were not read."""
    first, last = int(shown[0]["step"]), int(shown[-1]["step"])
    evaluated = [number for number in run.records.numbers("eval") if first <= number <= last]
    files: list[tuple[Kind, int]] = [("step", number) for number in steps]
    files += [("eval", number) for number in evaluated]
    unfetched: tuple[Kind, ...] = ("failed", "stale")
    for kind in unfetched:
        numbers = run.records.numbers(kind)
        files += [(kind, one) for one in numbers if run.records.written(kind, one) + MARGIN_S > window[0]]
    found, read, size, omitted = [], 0, 0, 0
    for kind, number in files:
        file = run.records.file(kind, number)
        for summary in file.summaries:
            if not _within(summary, window):
                continue
            if read == MOST_EPISODES or size > MOST_BYTES:
                omitted += 1
                continue
            read, size = read + 1, size + summary.length
            calls = list(calls_of(file.read(summary.line), published))
            episode = TimedEpisode(kind, 0 if kind in IN_PARTS else number, summary, calls)
            if episode.calls and episode.start < window[1] and episode.end > window[0]:
                found.append(episode)
    return found, omitted


def _within(episode: EpisodeSummary, window: Interval) -> bool:
    """Returns whether an episode may have a call in the window: its duration includes all of them."""
    if episode.started is None:
        return False
    return episode.started < window[1] and episode.started + (episode.seconds or 0.0) + MARGIN_S > window[0]


def calls_of(record: Mapping[str, Any], published: Mapping[int, float]) -> Iterator[TimedCall]:
    """Yields the calls of a record that have times: of engines, the environment's tools, and rewards.

    Args:
        record: A line of `trajectories/`.
        published: Version → time at which its publish began.
    """
    for turn in mappings(record.get("turns")):
        start, seconds = known(turn.get("started")), known(turn.get("seconds"))
        if start and seconds is not None:
            yield from _engine_call(start, start + seconds, [span[0] for span in spans_of(turn)], published)
    for call in mappings(record.get("tool_calls")):
        start, seconds = known(call.get("started")), known(call.get("seconds"))
        if start and seconds is not None:
            yield TimedCall(start, start + seconds, None, "tools", printable(call.get("name") or "tool"))
    start, seconds = known(record.get("reward_started")), known(record.get("reward_seconds"))
    if start and seconds is not None:
        yield TimedCall(start, start + seconds, None, "rewards", "rewards")


def _engine_call(
    start: float, end: float, versions: Sequence[int], published: Mapping[int, float]
) -> Iterator[TimedCall]:
    """Yields a call in parts: each version's tokens are sampled from its publish on."""
    for version, following in itertools.pairwise(versions):
        until = min(end, max(start, published.get(following, start)))
        if until > start:
            yield TimedCall(start, until, version, "engine", "")
        start = until
    yield TimedCall(start, end, versions[-1] if versions else None, "engine", "")


def _load(episodes: Sequence[TimedEpisode], window: Interval) -> list[dict[str, Any]]:
    """Returns how many episodes were in a call of each version, a tool, rewards, and between calls."""
    parts: dict[str, list[Interval]] = {}
    for one in episodes:
        for call in one.calls:
            unknown = "?" if call.version is None else call.version
            part = f"version {unknown}" if call.part == "engine" else call.part
            parts.setdefault(part, []).append((call.start, call.end))
    names = sorted(parts, key=lambda name: (name == "rewards", name == "tools", len(name), name))
    curves = {name: concurrency(parts[name], window) for name in names}
    running = concurrency([(one.start, one.end) for one in episodes], window)
    busy = sum(curves.values(), start=np.zeros(BINS))
    curves["between calls"] = np.maximum(0.0, running - busy)
    return [{"name": name, "points": _points(values, window)} for name, values in curves.items()]


def _waiting(
    run: FollowedRun, steps: Sequence[int], rows: Sequence[Row], window: Interval
) -> list[tuple[float, float]]:
    """Returns how many groups were finished and waited for the update of their step."""
    updates = {
        int(row["step"]): row["time"] - row["time/step"] + row.get("time/wait_for_batch", 0.0) for row in rows
    }
    ends: dict[tuple[int, str], float] = {}
    for step in steps:
        for one in run.records.file("step", step).summaries if step in updates else ():
            if one.state == "stepped" and one.started is not None:
                key = (step, one.group)
                ends[key] = max(ends.get(key, 0.0), one.started + (one.seconds or 0.0))
    waits = [(end, updates[step]) for (step, _), end in ends.items() if end < updates[step]]
    return _points(concurrency(waits, window), window)


def concurrency(intervals: Sequence[Interval], window: Interval) -> npt.NDArray[np.float64]:
    """Returns the mean number of intervals that are open in each of BINS equal parts of the window."""
    edges = np.linspace(*window, BINS + 1)
    open_s = np.zeros(BINS + 1)
    for start, end in intervals:
        open_s += np.clip(edges, start, max(start, end)) - start
    means: npt.NDArray[np.float64] = np.diff(open_s) / (edges[1] - edges[0])
    return means


def _points(values: npt.NDArray[np.float64], window: Interval) -> list[tuple[float, float]]:
    width = (window[1] - window[0]) / BINS
    return rounded([(round((index + 0.5) * width, 4), float(value)) for index, value in enumerate(values)])


def _to_wire(one: TimedEpisode, origin: float) -> dict[str, Any]:
    return {
        "kind": one.kind, "step": one.step, "line": one.summary.line, "group": one.summary.group,
        "task": one.summary.task, "outcome": one.summary.outcome, "reward": one.summary.reward,
        "calls": [
            [round(call.start - origin, 3), round(call.end - origin, 3), call.version, call.name, call.part]
            for call in one.calls
        ],
    }  # fmt: skip

"""Search over a run's episodes, by outcome, state, reward, task and text of the prompt."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Query

from tidegate.trainer.ledger.entries import State
from tidegate.viewer.dashboard.records import (
    IN_PARTS,
    EpisodeSummary,
    Kind,
    RecordFile,
    part_of,
    prompt_of,
)
from tidegate.viewer.dashboard.run import FollowedRun, Number

BUDGET_S = 2.0
"""Time after which a request returns what it has found; the next one continues."""
LINES_BETWEEN_LOOKS = 64
"""Episodes between two looks at the clock."""

Most = Annotated[int, Query(ge=1, le=500)]
Names = Annotated[list[str], Query(max_length=20)]
Text = Annotated[str, Query(max_length=500)]


@dataclass(frozen=True, slots=True)
class EpisodeFilter:
    """What is searched for; an empty condition holds for all episodes."""

    outcomes: frozenset[str]
    states: frozenset[str]
    low: float | None
    high: float | None
    task: str
    text: str

    def admits(self, episode: EpisodeSummary, state: str) -> bool:
        """Returns whether the conditions hold that need no prompt."""
        if self.outcomes and episode.outcome not in self.outcomes:
            return False
        if self.states and state not in self.states:
            return False
        if self.task and self.task.casefold() not in episode.task.casefold():
            return False
        low = -math.inf if self.low is None else self.low
        high = math.inf if self.high is None else self.high
        unlimited = self.low is None and self.high is None
        return unlimited or (episode.reward is not None and low <= episode.reward <= high)


def episodes(
    run: FollowedRun,
    *,
    kind: Kind = "step",
    outcome: Names = [],  # noqa: B006 - FastAPI copies it
    state: Names = [],  # noqa: B006
    low: float | None = None,
    high: float | None = None,
    task: Text = "",
    text: Text = "",
    step: Number | None = None,
    line: Number = 0,
    most: Most = 100,
) -> dict[str, Any]:
    """Returns episodes that fulfil all conditions, of the newest step first.

    Args:
        run: The run.
        kind: Which files are searched: `step` includes the episodes that became stale before a batch, which
            come last, as step 0, with the kind `stale`. `stale` has all stale ones, of batches too.
        outcome: Outcomes of which one is required.
        state: States of which one is required.
        low: Least reward.
        high: Largest reward.
        task: Part of the task's id.
        text: Part of the first message of the user; case does not matter.
        step: Step at which the search begins; by default the newest one.
        line: Line of that step's file at which it begins.
        most: Largest number of episodes.

    Returns:
        `episodes`, the number `searched`, and `next`, the step and line where the search continues, or None.
    """
    run.refresh()
    wanted = EpisodeFilter(frozenset(outcome), frozenset(state), low, high, task, text.casefold())
    found: list[dict[str, Any]] = []
    deadline = time.monotonic() + BUDGET_S
    looked = searched = 0
    for at, file, summary in _from(run, kind, step, line):
        late = looked and looked % LINES_BETWEEN_LOOKS == 0 and time.monotonic() > deadline
        if late or len(found) == most:
            return {"episodes": found, "searched": searched, "next": {"step": at, "line": summary.line}}
        looked += 1
        ended = run.state_of(summary)
        if kind == "stale" and ended != State.STALE:
            continue
        searched += 1
        if wanted.admits(summary, ended) and _has_text(file, summary, wanted.text):
            of = "stale" if kind == "step" and not at else "step" if kind == "stale" and at else kind
            found.append({**summary.to_wire(), "kind": of, "step": at, "state": ended})
    return {"episodes": found, "searched": searched, "next": None}


def _from(
    run: FollowedRun, kind: Kind, step: int | None, line: int
) -> Iterator[tuple[int, RecordFile, EpisodeSummary]]:
    """Yields each episode with its step and file, from a line of a step on to those of older steps.

    Those that failed, or became stale before a batch, are of step 0.
    """
    of: Kind
    for of in ("step", "stale") if kind in ("step", "stale") else (kind,):
        numbers = run.records.numbers(of)
        for number in numbers if of in IN_PARTS else reversed(numbers):
            at = 0 if of in IN_PARTS else number
            first = line if at == step else 0
            if (step is None or at <= step) and (of not in IN_PARTS or number >= part_of(first)):
                file = run.records.file(of, number)
                for summary in file.summaries[max(0, first - file.first) :]:
                    yield at, file, summary


def _has_text(file: RecordFile, episode: EpisodeSummary, text: str) -> bool:
    """Returns whether a prompt contains a text; reads the record if the summary has only its beginning."""
    if not text or text in episode.prompt.casefold():
        return True
    return episode.prompt_cut and text in prompt_of(file.read(episode.line)).casefold()

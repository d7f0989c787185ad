"""Plain view for non-terminals: one line per step, and messages between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from tidegate.observer import GROUP_STAGES
from tidegate.viewer.console import SafeConsole
from tidegate.viewer.formatting import duration, known, number, printable
from tidegate.viewer.held_out import held_out_names
from tidegate.viewer.live_state import LiveState
from tidegate.viewer.summary import final_summary

QUIET_S = 30.0
"""After this time without a line, a line about the run's state is printed."""
PROGRESS_S = 10.0
"""Minimum time between two lines about one operation's progress."""


class PlainView:
    """Prints a line for each step, evaluation, warning and message."""

    def __init__(
        self,
        out: SafeConsole,
        total_steps: int | None,
        bound: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.out = out
        self.live_state = LiveState(total_steps, bound, clock())
        self._clock = clock
        self._printed_at = self.live_state.started_at
        self._progress: tuple[str, float] | None = None

    def started(self, info: Mapping[str, object]) -> None:
        notes = self.live_state.start(info)
        bound = "none" if self.live_state.bound is None else str(self.live_state.bound)
        self.note(f"tidegate {info.get('name', '')}: {opening(info)}")
        self.note(f"staleness bound {bound}; files in {self.live_state.run_dir or 'no directory'}")
        for text in notes:
            self.note(text)

    def note(self, text: str) -> None:
        self._printed_at = self._clock()
        self.out.line(f"[{duration(self._printed_at - self.live_state.started_at):>6}] {printable(text)}")

    def progress(self, what: str, done: int, total: int) -> None:
        now = self._clock()
        name, spoke = self._progress or (what, now)
        if name != what:
            spoke = now
        due = done >= total or now - spoke >= PROGRESS_S
        self._progress = (what, now if due else spoke)
        if due:
            self.note(f"{what} {done}/{total}")
        if done >= total:
            self._progress = None

    def state(self, snapshot: Mapping[str, float]) -> None:
        for text in self.live_state.add_state(snapshot, self._clock()):
            self.note(text)
        if self._clock() - self._printed_at < QUIET_S:
            return
        stages = ", ".join(
            f"{number(snapshot.get(f'groups/{stage}', 0), 0)} {stage}" for stage in GROUP_STAGES
        )
        rate = number(self.live_state.tokens_per_s(), 0)
        what = "paused by an outage" if snapshot.get("outage/now") else "waiting"
        why = self.live_state.signs.filtered(snapshot)
        self.note(f"{what}: groups {stages}{f'; {why}' if why else ''}; {rate} tokens/s")

    def step(self, metrics: Mapping[str, float]) -> None:
        warnings = self.live_state.add_step(metrics, self._clock())
        if "reward/mean" in metrics:
            line = step_line(metrics, self.live_state.total_steps, self.live_state.tokens_per_s())
            left = self.live_state.seconds_left()
            self.note(line if not left else f"{line}  about {duration(left)} left")
        scores = [
            f"{name} {number(metrics[key], 3)}"
            for key, name in held_out_names(metrics).items()
            if known(metrics.get(key)) is not None
        ]
        if scores:
            self.note(f"evaluation after step {self.live_state.eval_step}: {'; '.join(scores)}")
        for text in warnings:
            self.note(text)

    def finished(self, result: Mapping[str, object]) -> None:
        final_summary(self.out, result, self.live_state.run_dir)

    def close(self) -> None:
        """Does nothing: the view holds no resources."""


def opening(info: Mapping[str, object]) -> str:
    """Returns the run's agent, environment, model, steps and gateway in one line."""
    words = [
        f"agent {info.get('agent', '?')}",
        f"env {info.get('env', '?')}",
        f"model {info.get('model', '?')}",
    ]
    if info.get("steps"):
        words.append(f"{info['steps']} steps")
    if info.get("gateway"):
        words.append(f"gateway {info['gateway']}")
    return ", ".join(words)


def step_line(metrics: Mapping[str, float], total_steps: int | None, tokens_per_s: float | None) -> str:
    """Formats one step in fixed columns, so that lines align.

    Stale and failed groups are counted from the start of the run; `(+1)` are those since the line before.
    """
    of, wide = ("", 5) if total_steps is None else (f"/{total_steps}", len(str(total_steps)))

    def cell(key: str, digits: int, width: int) -> str:
        return f"{number(metrics.get(key), digits):>{width}}"

    cells = [
        f"step {cell('step', 0, wide)}{of}",
        f"reward {cell('reward/mean', 3, 6)}",
        f"loss {cell('loss', 3, 7)}",
        f"staleness {cell('staleness/mean', 1, 4)} max {cell('staleness/max', 0, 2)}",
        f"{number(tokens_per_s, 0):>7} tokens/s",
        f"{cell('time/step', 1, 5)} s",
        f"waits: data {cell('time/wait_for_batch', 1, 4)} s, trainer {cell('time/batch_queue', 1, 4)} s",
    ]
    lost = [
        f"{state} {int(total)}{_since(metrics.get(f'selection/{state}_groups'))}"
        for state in ("stale", "failed")
        if (total := metrics.get(f"groups/{state}"))
    ]
    return "  ".join(cells + ([f"so far: {', '.join(lost)}"] if lost else []))


def _since(number: float | None) -> str:
    """Returns the number of groups since the line before, in brackets; empty for none."""
    return f" (+{int(number)})" if number else ""

"""Plain view for non-terminals: one line per step, and messages between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tidegate.observer import GROUP_STAGES
from tidegate.viewer.console import SafeConsole
from tidegate.viewer.formatting import duration, known, number, printable
from tidegate.viewer.held_out import held_out_names
from tidegate.viewer.live_state import Rate
from tidegate.viewer.signs.watch import SignWatch, watch_of_run
from tidegate.viewer.summary import final_summary

QUIET_S = 30.0
"""After this time without a line, a line about the run's state is printed."""
PROGRESS_S = 10.0
"""Minimum time between two lines about one operation's progress."""


class PlainView:
    """Prints at most one line per call."""

    def __init__(
        self,
        out: SafeConsole,
        total_steps: int | None,
        bound: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.out = out
        self.total_steps = total_steps
        self.bound = bound
        self._clock = clock
        self._started = self._printed_at = clock()
        self._run_dir: Path | None = None
        self._progress: tuple[str, float] | None = None
        self._first: tuple[float, int] | None = None
        """Time and number of the first step, for the pace."""
        self._sampled = Rate(10.0)
        self._signs = SignWatch()

    def started(self, info: Mapping[str, object]) -> None:
        self._run_dir = Path(str(info["dir"])) if info.get("dir") else None
        self._print(f"tidegate {info.get('name', '')}: {opening(info)}")
        bound = "none" if self.bound is None else str(self.bound)
        self._print(f"staleness bound {bound}; files in {self._run_dir or 'no directory'}")
        if info.get("resumed_from") is not None:
            self._print(f"resumed from step {info['resumed_from']}")
            self._signs = watch_of_run(self._run_dir)

    def note(self, text: str) -> None:
        self._print(text)

    def progress(self, what: str, done: int, total: int) -> None:
        now = self._clock()
        name, spoke = self._progress or (what, now)
        if name != what:
            spoke = now
        due = done >= total or now - spoke >= PROGRESS_S
        self._progress = (what, now if due else spoke)
        if due:
            self._print(f"{what} {done}/{total}")
        if done >= total:
            self._progress = None

    def state(self, snapshot: Mapping[str, float]) -> None:
        self._count(snapshot)
        if (sign := self._signs.state(snapshot)) is not None:
            self._print(f"warning: {sign}")
        if self._clock() - self._printed_at < QUIET_S:
            return
        stages = ", ".join(
            f"{number(snapshot.get(f'groups/{stage}', 0), 0)} {stage}" for stage in GROUP_STAGES
        )
        rate = number(self._sampled.per_second(), 0)
        what = "paused by an outage" if snapshot.get("outage/now") else "waiting"
        why = self._signs.filtered(snapshot)
        self._print(f"{what}: groups {stages}{f'; {why}' if why else ''}; {rate} tokens/s")

    def step(self, metrics: Mapping[str, float]) -> None:
        if "reward/mean" in metrics:
            self._count(metrics)
            line = step_line(metrics, self.total_steps, self._sampled.per_second())
            self._print(line + self._left(int(metrics.get("step", 0))))
        scores = [
            f"{name} {number(metrics[key], 3)}"
            for key, name in held_out_names(metrics).items()
            if known(metrics.get(key)) is not None
        ]
        if scores:
            of = metrics.get("eval/step", metrics.get("step", 0))
            self._print(f"evaluation after step {int(of)}: {'; '.join(scores)}")
        for sign in self._signs.step(metrics):
            self._print(f"warning: {sign}")

    def _left(self, step: int) -> str:
        """Returns the predicted time to the last step, by the pace since the first one."""
        now = self._clock()
        then, first = self._first = self._first or (now, step)
        if self.total_steps is None or not first < step < self.total_steps:
            return ""
        return f"  about {duration((now - then) / (step - first) * (self.total_steps - step))} left"

    def _count(self, numbers: Mapping[str, float]) -> None:
        total = known(numbers.get("tokens/sampled_total"))
        if total is not None:
            self._sampled.add(self._clock(), total)

    def finished(self, result: Mapping[str, object]) -> None:
        final_summary(self.out, result, self._run_dir)

    def close(self) -> None:
        """Does nothing: the view holds no resources."""

    def _print(self, text: str) -> None:
        self._printed_at = self._clock()
        self.out.line(f"[{duration(self._printed_at - self._started):>6}] {printable(text)}")


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

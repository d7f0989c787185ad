"""The live view: one screen with the run's state, redrawn at most twice a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tidegate.observer import GROUP_ENDINGS, GROUP_STAGES, Observer
from tidegate.viewer.console import SafeConsole, Terminal
from tidegate.viewer.formatting import duration, known, number, printable, smoothed, sparkline
from tidegate.viewer.live_state import EvalStatus, LiveState
from tidegate.viewer.log_view import PlainView
from tidegate.viewer.summary import ACCENT, final_summary

REFRESHES_PER_S = 2.0
NEWS_LINES = 5
BAR = 20


def make_view(live: bool, total_steps: int, bound: int | None, console: Console | None = None) -> Observer:
    """The live view where it is wanted and the console can show it, else plain lines.

    `bound` is `max_staleness`, None where there is none. The live view needs a terminal that can move
    its cursor and print UTF-8.
    """
    console = console or Terminal()
    able = console.is_terminal and not console.is_dumb_terminal and console.encoding.lower().startswith("utf")
    view = LiveView if live and able else PlainView
    return view(SafeConsole(console), total_steps, bound)


class LiveView:
    """Draws a `LiveState`. A thread of its own redraws; the trainer's calls only note what they are told."""

    def __init__(
        self,
        out: SafeConsole,
        total_steps: int,
        bound: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.out = out
        self.board = LiveState(total_steps, bound, clock())
        self._clock = clock
        self._lock = threading.Lock()
        self._closed = False
        self._live = Live(
            get_renderable=self._draw,
            console=out.console,
            refresh_per_second=REFRESHES_PER_S,
            transient=False,
        )

    def started(self, info: Mapping[str, object]) -> None:
        with self._lock:
            self.board.info = dict(info)
            if info.get("resumed_from") is not None:
                self.board.note(f"resumed from step {info['resumed_from']}", self._clock())
        self._live.start()

    def note(self, text: str) -> None:
        if self._closed:
            self.out.line(printable(text))
            return
        with self._lock:
            self.board.note(text, self._clock())

    def progress(self, what: str, done: int, total: int) -> None:
        with self._lock:
            self.board.progress = EvalStatus(what, done, total) if done < total else None

    def state(self, snapshot: Mapping[str, float]) -> None:
        with self._lock:
            self.board.add_state(snapshot, self._clock())

    def step(self, metrics: Mapping[str, float]) -> None:
        with self._lock:
            self.board.add_step(metrics, self._clock())

    def finished(self, result: Mapping[str, object]) -> None:
        self.close()
        run_dir = self.board.info.get("dir")
        final_summary(self.out, result, Path(str(run_dir)) if run_dir else None)

    def close(self) -> None:
        self._closed = True
        try:
            self._live.stop()
        except (OSError, ValueError) as error:
            self.out.lost = error if isinstance(error, OSError) else OSError(str(error))

    def _draw(self) -> RenderableType:
        with self._lock:
            return screen(self.board, self._clock(), self.out.console.width)


def screen(board: LiveState, clock: float, width: int) -> RenderableType:
    """The whole view for a terminal so wide, at that reading of the clock."""
    spark = max(8, min(50, width - 60))
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(width=9, style="dim")
    table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    rows = {
        "reward": _reward(board, spark),
        "held out": _held_out(board, width),
        "staleness": _staleness(board, spark),
        "sampling": _sampling(board, spark),
        "waiting": _waiting(board),
        "groups": _groups(board, GROUP_STAGES),
        "": _groups(board, GROUP_ENDINGS),
    }
    for name, row in rows.items():
        table.add_row(name, row)
    body = [_head(board, clock), Text(""), table, Text(""), *_news(board)]
    title = Text.assemble(
        (" tidegate ", f"bold {ACCENT}"), (f"{printable(board.info.get('name', ''))} ", "bold")
    )
    return Panel(
        Group(*body),
        title=title,
        title_align="left",
        border_style="bright_black",
        padding=(0, 1),
        width=min(width, 120),
    )


def _head(board: LiveState, clock: float) -> RenderableType:
    info = board.info
    what = Text(no_wrap=True, overflow="ellipsis")
    what.append(f"{printable(info.get('agent', 'agent'))} on {printable(info.get('env', 'env'))}", "bold")
    what.append(f"  {printable(info.get('model', ''))}  {printable(info.get('gateway', ''))}", "dim")
    left = board.seconds_left()
    ahead = f"{duration(clock - board.started_at)} elapsed"
    ahead += "" if left is None else f", about {duration(left)} left"
    line = Table.grid(padding=(0, 2), expand=True)
    line.add_column(no_wrap=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True)
    bar = ProgressBar(
        board.total_steps, min(board.at, board.total_steps), complete_style=ACCENT, finished_style=ACCENT
    )
    line.add_row(Text.assemble("step ", (f"{board.at}", "bold"), f"/{board.total_steps}"), bar, ahead)
    return Group(what, line)


def _reward(board: LiveState, spark: int) -> Text:
    values = board.trend("reward/mean")
    if not values:
        return Text("no step yet", "dim")
    smooth = smoothed(values)
    then = smooth[max(0, len(smooth) - 11)]
    change = smooth[-1] - then
    arrow = "↗" if change > 0.005 else "↘" if change < -0.005 else "→"
    return Text.assemble(
        (f"{number(values[-1])}", "bold"),
        ("  ", ""),
        (f"{sparkline(values, spark, *_unit_range(values)):<{spark}}", ACCENT),
        (f"  smoothed {number(smooth[-1])} {arrow} {change:+.3f}", "dim"),
    )


def _unit_range(values: list[float]) -> tuple[float, float]:
    """0 to 1 where rewards lie there, else their own range: a flat line must look flat."""
    return min(0.0, *values, 0.0), max(1.0, *values, 1.0)


EVAL_NAMES = {
    "eval/reward": "sampled",
    "eval/reward_greedy": "greedy",
    "eval/reward_unseen_templates": "unseen",
}


def _held_out(board: LiveState, width: int) -> Text:
    if not board.first_eval:
        return Text("not evaluated yet", "dim")
    line = Text()
    for key, name in EVAL_NAMES.items():
        first, last = board.first_eval.get(key), board.last_eval.get(key)
        if last is None:
            continue
        line.append("  " if line.plain else "")
        line.append(f"{name} ", "dim")
        line.append(f"{number(first)} → " if len(board.trend(key)) > 1 else "")
        line.append(number(last), f"bold {ACCENT}")
    if width >= 84:
        line.append(f"  at step {board.eval_step}", "dim")
    return line


def _staleness(board: LiveState, spark: int) -> Text:
    mean, most = board.last.get("staleness/mean"), board.last.get("staleness/max")
    bound = "none" if board.bound is None else str(board.bound)
    values = board.trend("staleness/mean")
    top = float(board.bound) if board.bound else max([1.0, *values])
    line = Text.assemble(
        (f"{number(mean, 2)}", "bold"),
        ("  ", ""),
        (f"{sparkline(values, spark, 0.0, top):<{spark}}", ACCENT),
        (f"  max {number(most, 0)}, bound {bound}", "dim"),
    )
    mixed = board.recent("weight_version/mixed_turn_ratio", 10)
    if mixed:
        line.append(f"; {mixed:.0%} of turns mixed", "dim")
    return line


def _sampling(board: LiveState, spark: int) -> Text:
    line = Text.assemble((f"{number(board.tokens_per_s(), 0)}", "bold"), (" tokens/s", ""))
    version = board.now.get("version", board.last.get("version"))
    line.append(f"  version {number(version, 0)}", "dim")
    shape = {"turns/mean": "turns", "tool_calls/mean": "tool calls", "length/mean": "tokens"}
    cells = [
        f"{number(board.last[key], 0 if key == 'length/mean' else 1)} {name}"
        for key, name in shape.items()
        if key in board.last
    ]
    line.append(f"   {', '.join(cells)}" if cells else "", "dim")
    return line


def _waiting(board: LiveState) -> RenderableType:
    """Two bars: shares of a step in which the trainer waited for data, and data for the trainer."""
    whole = board.recent("time/step")
    if not whole:
        return Text("no step yet", "dim")
    grid = Table.grid(padding=(0, 1))
    for _ in range(3):
        grid.add_column(no_wrap=True)
    for key, name in (
        ("time/wait_for_batch", "trainer for data"),
        ("time/wait_for_policy", "data for trainer"),
    ):
        seconds = board.recent(key)
        share = min(1.0, (seconds or 0.0) / whole)
        filled = round(share * BAR)
        bar = Text.assemble(("█" * filled, ACCENT), ("─" * (BAR - filled), "dim"))
        grid.add_row(name, bar, Text(f"{number(seconds, 1)} of {number(whole, 1)} s a step", "dim"))
    return grid


STATE_STYLES = {"trained": "green", "stale": "yellow", "failed": "red", "cancelled": "yellow"}


def _groups(board: LiveState, names: Sequence[str]) -> Text:
    counts = {**board.last, **board.now}
    line = Text()
    for name in names:
        value = known(counts.get(f"groups/{name}"))
        if value is None or (name in GROUP_ENDINGS[1:] and not value):
            continue
        line.append("  " if line.plain else "")
        line.append(f"{int(value):,}", f"bold {STATE_STYLES.get(name, '')}" if value else "dim")
        line.append(f" {name}", "dim")
    if names is GROUP_STAGES and counts.get("outage/now"):
        line.append("  paused by an outage", "bold red")
    quarantined = known(counts.get("groups/quarantined_tasks")) if names is GROUP_ENDINGS else None
    if quarantined:
        line.append(f"  {int(quarantined):,} tasks quarantined", "red")
    return line


def _news(board: LiveState) -> list[Text]:
    lines = []
    if board.progress is not None:
        done, total = board.progress.done, max(1, board.progress.total)
        filled = round(BAR * done / total)
        lines.append(
            Text.assemble(
                (f"{printable(board.progress.what)} {done}/{board.progress.total} ", "bold"),
                ("█" * filled, ACCENT),
                ("─" * (BAR - filled), "dim"),
            )
        )
    for when, text in list(board.news)[-(NEWS_LINES - len(lines)) :]:
        stamp = f"{duration(when - board.started_at):>7}  "
        line = Text(no_wrap=True, overflow="ellipsis")
        lines.append(line.append(stamp, "dim").append(printable(text)))
    return lines

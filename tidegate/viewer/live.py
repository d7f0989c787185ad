"""The live view: one screen with the run's state, redrawn at most twice a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tidegate.observer import GROUP_ENDINGS, GROUP_STAGES, Observer
from tidegate.viewer.console import SafeConsole, Terminal
from tidegate.viewer.formatting import duration, known, number, plain, printable, smoothed, sparkline
from tidegate.viewer.held_out import held_out_names
from tidegate.viewer.live_state import LiveState
from tidegate.viewer.log_view import PlainView
from tidegate.viewer.summary import ACCENT, final_summary

REFRESHES_PER_S = 2.0
NEWS_LINES = 5
BAR = 20


def make_view(
    live: bool, total_steps: int | None, bound: int | None, console: Console | None = None
) -> Observer:
    """Returns the live view if `live` is set and the console supports it, else the plain view.

    `total_steps` is None without a limit. `bound` is `max_staleness`, None if there is no bound. The live
    view needs a terminal that can move its cursor and print UTF-8.
    """
    console = console or Terminal()
    supported = (
        console.is_terminal and not console.is_dumb_terminal and console.encoding.lower().startswith("utf")
    )
    view = LiveView if live and supported else PlainView
    return view(SafeConsole(console), total_steps, bound)


class LiveView:
    """Draws a `LiveState` in its own thread; the observer's methods only update the state."""

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
            self._add(self.live_state.start(info))
        self._live.start()

    def note(self, text: str) -> None:
        if self._closed:
            self.out.line(printable(text))
            return
        with self._lock:
            self._add([text])

    def _add(self, news: Sequence[str]) -> None:
        self.live_state.news += [(self._clock(), text) for text in news]

    def progress(self, what: str, done: int, total: int) -> None:
        with self._lock:
            self.live_state.progress = (what, done, total) if done < total else None

    def state(self, snapshot: Mapping[str, float]) -> None:
        with self._lock:
            self._add(self.live_state.add_state(snapshot, self._clock()))

    def step(self, metrics: Mapping[str, float]) -> None:
        with self._lock:
            self._add(self.live_state.add_step(metrics, self._clock()))

    def finished(self, result: Mapping[str, object]) -> None:
        self.close()
        final_summary(self.out, result, self.live_state.run_dir)

    def close(self) -> None:
        self._closed = True
        try:
            self._live.stop()
        except (OSError, ValueError) as error:
            self.out.lost = error if isinstance(error, OSError) else OSError(str(error))

    def _draw(self) -> RenderableType:
        with self._lock:
            return screen(self.live_state, self._clock(), self.out.console.width)


def screen(state: LiveState, clock: float, width: int) -> RenderableType:
    """Returns the view for a terminal of `width` columns at the clock's reading `clock`."""
    spark = max(8, min(50, width - 60))
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(width=9, style="dim")
    table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    rows = {
        "reward": _reward(state, spark),
        "held out": _held_out(state, width),
        "staleness": _staleness(state, spark),
        "sampling": _sampling(state),
        "waiting": _waiting(state),
        "groups": _groups(state, GROUP_STAGES),
        "": _groups(state, GROUP_ENDINGS),
    }
    if state.signs.current:
        rows["warnings"] = Text(", ".join(state.signs.current), "yellow")
    for name, row in rows.items():
        table.add_row(name, row)
    body = [_head(state, clock), Text(""), table, Text(""), *_news(state)]
    title = Text.assemble(
        (" tidegate ", f"bold {ACCENT}"), (f"{printable(state.info.get('name', ''))} ", "bold")
    )
    return Panel(
        Group(*body),
        title=title,
        title_align="left",
        border_style="bright_black",
        padding=(0, 1),
        width=min(width, 120),
    )


def _head(state: LiveState, clock: float) -> RenderableType:
    info = state.info
    title = Text(no_wrap=True, overflow="ellipsis")
    title.append(f"{printable(info.get('agent', 'agent'))} on {printable(info.get('env', 'env'))}", "bold")
    title.append(f"  {printable(info.get('model', ''))}  {printable(info.get('gateway', ''))}", "dim")
    left = state.seconds_left()
    timing = f"{duration(clock - state.started_at)} elapsed"
    timing += "" if left is None else f", about {duration(left)} left"
    line = Table.grid(padding=(0, 2), expand=True)
    line.add_column(no_wrap=True)
    line.add_column(ratio=1)
    line.add_column(no_wrap=True)
    total = state.total_steps
    step, of = ("step ", (f"{state.at}", "bold")), "" if total is None else f"/{total}"
    bar: RenderableType = ""
    if total is not None:
        bar = ProgressBar(total, min(state.at, total), complete_style=ACCENT, finished_style=ACCENT)
    line.add_row(Text.assemble(*step, of), bar, timing)
    return Group(title, line)


def _reward(state: LiveState, spark: int) -> Text:
    values = state.trend("reward/mean")
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
    """Returns a range that includes 0 to 1 and all values, so that a flat line looks flat."""
    return min(0.0, *values, 0.0), max(1.0, *values, 1.0)


def _held_out(state: LiveState, width: int) -> Text:
    if not state.first_eval:
        return Text("not evaluated yet", "dim")
    line = Text(f"at step {state.eval_step}" if width >= 84 else "", "dim")
    for key, name in held_out_names(state.last_eval).items():
        first, last = state.first_eval.get(key), state.last_eval.get(key)
        if last is None:
            continue
        line.append("  " if line.plain else "")
        line.append(f"{name.removeprefix('held out, ')} ", "dim")
        line.append(f"{number(first)} → " if len(state.trend(key)) > 1 else "")
        line.append(number(last), f"bold {ACCENT}")
    return line


def _staleness(state: LiveState, spark: int) -> Text:
    mean, largest = state.last.get("staleness/mean"), state.last.get("staleness/max")
    bound = "none" if state.bound is None else str(state.bound)
    values = state.trend("staleness/mean")
    top = float(state.bound) if state.bound else max([1.0, *values])
    line = Text.assemble(
        (f"{number(mean, 2)}", "bold"),
        ("  ", ""),
        (f"{sparkline(values, spark, 0.0, top):<{spark}}", ACCENT),
        (f"  max {number(largest, 0)}, bound {bound}", "dim"),
    )
    mixed = state.recent("weight_version/mixed_turn_ratio", 10)
    if mixed:
        line.append(f"; {mixed:.0%} of turns mixed", "dim")
    return line


def _sampling(state: LiveState) -> Text:
    line = Text.assemble((f"{number(state.tokens_per_s(), 0)}", "bold"), (" tokens/s", ""))
    version = state.now.get("version", state.last.get("version"))
    line.append(f"  version {plain(version)}", "dim")
    shape = {"turns/mean": "turns", "tool_calls/mean": "tool calls", "length/mean": "tokens"}
    cells = [
        f"{number(state.last[key], 0 if key == 'length/mean' else 1)} {name}"
        for key, name in shape.items()
        if key in state.last
    ]
    line.append(f"   {', '.join(cells)}" if cells else "", "dim")
    return line


def _waiting(state: LiveState) -> RenderableType:
    """Returns two bars: the shares of step time in which the trainer waited for data, and vice versa."""
    step_s = state.recent("time/step")
    if not step_s:
        return Text("no step yet", "dim")
    grid = Table.grid(padding=(0, 1))
    for _ in range(3):
        grid.add_column(no_wrap=True)
    for key, name in (
        ("time/wait_for_batch", "trainer for data"),
        ("time/batch_queue", "data for trainer"),
    ):
        seconds = state.recent(key)
        share = min(1.0, (seconds or 0.0) / step_s)
        grid.add_row(name, _bar(share), Text(f"{number(seconds, 1)} of {number(step_s, 1)} s a step", "dim"))
    return grid


def _bar(share: float) -> Text:
    filled = round(share * BAR)
    return Text.assemble(("█" * filled, ACCENT), ("─" * (BAR - filled), "dim"))


STATE_STYLES = {"trained": "green", "stale": "yellow", "failed": "red", "cancelled": "yellow"}


def _groups(state: LiveState, names: Sequence[str]) -> Text:
    counts = {**state.last, **state.now}
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


def _news(state: LiveState) -> list[Text]:
    lines = []
    if state.progress is not None:
        what, done, total = state.progress
        title = (f"{printable(what)} {done}/{total} ", "bold")
        lines.append(Text.assemble(title, _bar(done / max(1, total))))
    for when, text in list(state.news)[-(NEWS_LINES - len(lines)) :]:
        stamp = f"{duration(when - state.started_at):>7}  "
        line = Text(no_wrap=True, overflow="ellipsis")
        lines.append(line.append(stamp, "dim").append(printable(text)))
    return lines

"""Which view a run gets."""

from __future__ import annotations

from rich.console import Console

from tidegate.viewer.base import RunView
from tidegate.viewer.live import LiveView
from tidegate.viewer.out import Out
from tidegate.viewer.plain import PlainView


def make_view(live: bool, total_steps: int, bound: int | None, console: Console | None = None) -> RunView:
    """The live view where it is wanted and the console can show it, else plain lines.

    `bound` is `max_staleness`, None where there is none. The live view needs a terminal that can move
    its cursor and print UTF-8.
    """
    console = console or Console()
    able = console.is_terminal and not console.is_dumb_terminal and console.encoding.lower().startswith("utf")
    view = LiveView if live and able else PlainView
    return view(Out(console), total_steps, bound)

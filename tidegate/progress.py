"""Shows the progress of operations on standard error: bars on a terminal, elsewhere ten lines a stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, TextIO

from rich import progress
from rich.console import Console

OnProgress = Callable[[int, int], None]
"""Takes the number of finished parts of a stage, and the (approximate) total."""
LINES = 10


class Progress:
    """Shows stages, and lines of text between them. Used in a `with` block, it restores the terminal."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._console = Console(file=stream, stderr=stream is None)
        self._bars = progress.Progress(
            progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn(),
            progress.TaskProgressColumn(show_speed=True), progress.TimeRemainingColumn(),
            console=self._console, redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self._bars.stop()

    def print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    @property
    def is_terminal(self) -> bool:
        return self._console.is_terminal and self._console.file.isatty()  # FORCE_COLOR makes the first true

    def stage(self, what: str) -> OnProgress:
        return self._bar(what) if self.is_terminal else self._lines(what)

    def _bar(self, what: str) -> OnProgress:
        task = self._bars.add_task(what, total=None)

        def show(done: int, total: int) -> None:
            self._bars.start()
            self._bars.update(task, completed=done, total=total)

        return show

    def _lines(self, what: str) -> OnProgress:
        printed = 0

        def show(done: int, total: int) -> None:
            nonlocal printed
            reached = done * LINES // total if total else LINES
            if reached > printed:
                printed = reached
                self.print(f"{what}: {done:,} of {total:,}")

        return show

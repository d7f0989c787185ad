"""Console whose output errors cannot stop a run."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console, RenderableType


class Terminal(Console):
    """Standard output. If it is closed, rich exits the program; this class stops printing."""

    @property
    def is_terminal(self) -> bool:
        # FORCE_COLOR, which notebooks set, makes rich take a pipe for a terminal.
        return super().is_terminal and self.file.isatty()

    def on_broken_pipe(self) -> None:
        self.quiet = True


class SafeConsole:
    """A console whose failures do not stop the run.

    If the reader is gone (a closed pipe, a lost terminal) or the disk is full, nothing more is written, and
    `lost` has the reason. Characters that the encoding lacks become question marks.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.lost: OSError | None = None

    def line(self, text: str) -> None:
        """One line as it is, without markup or wrapping."""
        self._write(f"{text}\n")

    def show(self, renderable: RenderableType, wrap: bool = True) -> None:
        """`wrap` False leaves long lines to the terminal, so that they can be copied whole."""
        drawn = io.StringIO()
        terminal = self.console.is_terminal
        kind: Any = self.console.color_system
        page = Console(file=drawn, width=self.console.width, force_terminal=terminal, color_system=kind)
        page.print(renderable, markup=False, highlight=False, soft_wrap=not wrap)
        self._write(drawn.getvalue())

    def _write(self, text: str) -> None:
        if self.lost is not None:
            return
        encoding = self.console.encoding
        try:
            self.console.file.write(text.encode(encoding, errors="replace").decode(encoding))
            self.console.file.flush()
        except (OSError, ValueError) as error:
            # A closed file raises ValueError, which is the same loss.
            self.lost = error if isinstance(error, OSError) else OSError(str(error))

"""Printing that a run survives."""

from __future__ import annotations

from rich.console import Console, RenderableType


class Out:
    """A console that may go away.

    Where the reader is gone (a closed pipe, a lost terminal) or the disk behind it is full, nothing more
    is written and `lost` says why: a run of hours does not end because nobody looks. Characters that the
    console's encoding lacks become question marks.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.lost: OSError | None = None

    def line(self, text: str) -> None:
        """One line as it is, without markup or wrapping."""
        self._write(f"{text}\n")

    def show(self, renderable: RenderableType) -> None:
        with self.console.capture() as captured:
            self.console.print(renderable, markup=False, highlight=False)
        self._write(captured.get())

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

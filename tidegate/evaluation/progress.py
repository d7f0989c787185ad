"""Progress on standard error: one line that is overwritten, or on a non-terminal up to ten lines."""

from __future__ import annotations

import sys
import time

_LINES = 10
_REDRAW_S = 0.1


class EvalProgress:
    """Shows progress when called with (done, total)."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._tty = sys.stderr.isatty()
        self._drawn = 0.0
        self._tenths = 0
        self._open = False

    def __call__(self, done: int, total: int) -> None:
        if self._tty:
            now = time.monotonic()
            if done == total or now - self._drawn > _REDRAW_S:
                self._drawn = now
                end = "\n" if done == total else ""
                print(f"\r{self._what}: {done:,} of {total:,}", end=end, file=sys.stderr, flush=True)
            self._open = done < total
        elif (tenths := done * _LINES // total if total else _LINES) > self._tenths:
            self._tenths = tenths
            print(f"{self._what}: {done:,} of {total:,}", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """Prints one line for the user between the others."""
        print(f"\n{text}" if self._open else text, file=sys.stderr, flush=True)
        self._open = False

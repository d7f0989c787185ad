"""Prints the progress of a build on standard error."""

from __future__ import annotations

import sys
import time
from typing import Protocol, TextIO

_EVERY_S = 10.0
_REDRAW_S = 0.2


class OnProgress(Protocol):
    def __call__(self, done: int, total: int) -> None: ...


class BuildProgress:
    """Redraws a stage's line on a terminal; elsewhere prints a line every ten seconds."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._tty = self._stream.isatty()
        self._open = False

    def print(self, text: str) -> None:
        print(f"\n{text}" if self._open else text, file=self._stream, flush=True)
        self._open = False

    def stage(self, what: str) -> OnProgress:
        """Returns a callback that takes the number of finished documents and the (approximate) total."""
        return _Stage(self, what)

    def draw(self, text: str, *, last: bool) -> None:
        if self._tty:
            print(f"\r\x1b[K{text}", end="\n" if last else "", file=self._stream, flush=True)
            self._open = not last
        else:
            print(text, file=self._stream, flush=True)

    @property
    def pause_s(self) -> float:
        return _REDRAW_S if self._tty else _EVERY_S


class _Stage:
    def __init__(self, progress: BuildProgress, what: str) -> None:
        self._progress = progress
        self._what = what
        self._first: tuple[int, float] | None = None
        self._drawn = 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        # The first value is the work of an earlier build, which is excluded from the speed.
        self._first = self._first or (done, now)
        last = done >= total
        if last or now - self._drawn >= self._progress.pause_s:
            self._drawn = now
            self._progress.draw(
                f"{self._what}: {done:,} of {total:,}{self._speed(done, total, now)}", last=last
            )

    def _speed(self, done: int, total: int, now: float) -> str:
        assert self._first is not None
        before, since = self._first
        if done == before or now - since < 1.0:
            return ""
        rate = (done - before) / (now - since)
        left = f", {duration((total - done) / rate)} left" if total > done else ""
        return f" ({rate:,.0f}/s{left})"


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def size(count: float) -> str:
    """Formats bytes with decimal units."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"

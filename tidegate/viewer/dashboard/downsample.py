"""Reduces the metrics of very long runs to a few thousand rows, so that curves are drawn quickly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tidegate.viewer.run_files import Row, RunFiles

MOST_ROWS = 3000
"""Ten times what a chart shows."""

LAST = ("step", "time", "version", "episodes", "tokens/sampled_total")
"""Counted since the start of the run, like `groups/…` and `attempts/…`: their newest value stands."""


class Downsampled:
    """Rows in runs of equal length, each made one; what was made of whole runs is kept while a run grows."""

    def __init__(self) -> None:
        self._size = 1
        self._sealed: list[Row] = []
        self._ends: Row | None = None
        """The last row of the last sealed run: where it is another one, the run went back."""

    def of(self, files: RunFiles) -> RunFiles:
        """The same run with at most about MOST_ROWS rows; the very first row always stands by itself."""
        if len(files.rows) <= MOST_ROWS:
            return files
        first, rows = files.rows[0], files.rows[1:]
        size = 1
        while len(rows) > size * MOST_ROWS:
            size *= 2
        done = len(self._sealed) * self._size
        if size != self._size or done > len(rows) or (done and rows[done - 1] is not self._ends):
            self._size, self._sealed, done = size, [], 0
        # The newest row may still be added to, as an evaluation's scores are: its run is not sealed.
        while done + size < len(rows):
            self._sealed.append(one_of(rows[done : done + size]))
            done += size
            self._ends = rows[done - 1]
        return replace(files, rows=[first, *self._sealed, one_of(rows[done:])])


def one_of(rows: Sequence[Row]) -> Row:
    """The mean of each metric over the rows that have it; the newest value of what is counted from the start
    and of scores, the largest of what is a maximum."""
    found: Row = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        values = [row[key] for row in rows if key in row]
        if key in LAST or key.startswith(("groups/", "attempts/", "eval/")):
            found[key] = values[-1]
        elif key.endswith("/max"):
            found[key] = max(values)
        else:
            found[key] = sum(values) / len(values)
    return found

"""Runs a metrics logger in a background thread, so a slow or failing logger cannot block or crash the run."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from typing import Protocol

from tidegate.observer import Silent

MAX_QUEUED = 1000
"""Limit of queued lines; a logger that exceeds it is disabled."""
CLOSE_S = 20.0
"""Time limit for writing the queued lines at the end of a run."""
START_DELAYS_S = (2.0, 10.0, 30.0)
"""Seconds before each further attempt to start a logger, whose server may be unreachable for a moment."""


class Logger(Protocol):
    """Stores the metrics of steps. It may block and raise any exception."""

    def step(self, metrics: Mapping[str, float]) -> None:
        """Store the metrics of one step, as in `metrics.jsonl`."""

    def close(self) -> None:
        """Finish; no further step follows."""


class BackgroundLogger(Silent):
    """Passes each step's metrics to a logger in a background thread.

    If `make` raises, it is called again after each of `START_DELAYS_S`, while steps are queued. If no attempt
    succeeds, or the logger raises later or falls far behind, it is reported once and gets no more steps.

    Args:
        name: Name in messages.
        make: Creates the logger, given the step that the run resumes from (0 for a new run).
        report: Receives one-line messages about failures.
    """

    def __init__(self, name: str, make: Callable[[int], Logger], report: Callable[[str], None]) -> None:
        self._name = name
        self._make = make
        self._report = report
        self._lines: queue.Queue[Mapping[str, float] | None] = queue.Queue(MAX_QUEUED)
        self._disabled = threading.Event()
        self._closing = threading.Event()
        self._step = 0
        self._thread = threading.Thread(target=self._work, name=f"logger {name}", daemon=True)

    def started(self, info: Mapping[str, object]) -> None:
        self._step = int(str(info["resumed_from"] or 0))
        self._thread.start()

    def step(self, metrics: Mapping[str, float]) -> None:
        # A copy: the line is read in the thread after the caller may have changed it.
        self._put(dict(metrics))

    def close(self) -> None:
        if self._disabled.is_set() or not self._thread.is_alive():
            return
        self._closing.set()
        self._put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._disable(f"it did not finish within {CLOSE_S:g} s")

    def _put(self, line: Mapping[str, float] | None) -> None:
        if self._disabled.is_set():
            return
        try:
            # A full queue must not block the training loop.
            self._lines.put_nowait(line)
        except queue.Full:
            self._disable(f"{MAX_QUEUED} steps are queued")

    def _work(self) -> None:
        try:
            logger = self._start()
            while (line := self._lines.get()) is not None:
                logger.step(line)
            logger.close()
        except Exception as error:  # noqa: BLE001 - reported; a failing logger must not fail the run
            self._disable(f"{type(error).__name__}: {error}")

    def _start(self) -> Logger:
        """Create the logger. The end of the run skips the delays."""
        for delay in START_DELAYS_S:
            try:
                return self._make(self._step)
            except Exception as error:  # noqa: BLE001 - reported; the last attempt below raises
                why = f"{type(error).__name__}: {error}"
                self._report(f"the logger {self._name} did not start ({why}); trying again in {delay:g} s")
            # The end of the run must not wait for a server that may never answer.
            self._closing.wait(delay)
        return self._make(self._step)

    def _disable(self, why: str) -> None:
        if not self._disabled.is_set():
            self._disabled.set()
            self._report(f"the logger {self._name} is disabled: {why}")

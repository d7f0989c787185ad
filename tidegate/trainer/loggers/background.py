"""A logger in a thread of its own: whatever it does, the run neither waits for it nor dies of it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from typing import Protocol

from tidegate.observer import Silent

MOST_WAITING = 1000
"""Lines that wait for the logger; with more it is left out."""
CLOSE_S = 20.0
"""How long the end of a run waits for what the logger still has to write."""
START_DELAYS_S = (2.0, 10.0, 30.0)
"""Seconds before each further try to start a logger: its server may be out of reach for a moment."""


class Logger(Protocol):
    """Keeps the metrics of steps somewhere. It may block, and it may raise anything."""

    def step(self, metrics: Mapping[str, float]) -> None:
        """The metrics of one step, as in `metrics.jsonl`."""

    def close(self) -> None:
        """No more will come."""


class BackgroundLogger(Silent):
    """Hands each step's metrics to a logger, in a thread that begins with the run.

    `make(step)` makes the logger, `step` being the one the run goes on from (0: it is new). It is called
    again after each of `START_DELAYS_S` where it raises; steps queue meanwhile. If no try succeeds, or the
    logger raises later or falls far behind, `say` gets one line about it, and the logger gets no more steps.
    """

    def __init__(self, name: str, make: Callable[[int], Logger], say: Callable[[str], None]) -> None:
        self._name = name
        self._make = make
        self._say = say
        self._lines: queue.Queue[Mapping[str, float] | None] = queue.Queue(MOST_WAITING)
        self._out = threading.Event()
        self._closing = threading.Event()
        self._step = 0
        self._thread = threading.Thread(target=self._work, name=f"logger {name}", daemon=True)

    def started(self, info: Mapping[str, object]) -> None:
        self._step = int(str(info["resumed_from"] or 0))
        self._thread.start()

    def step(self, metrics: Mapping[str, float]) -> None:
        self._put(dict(metrics))

    def close(self) -> None:
        if self._out.is_set() or not self._thread.is_alive():
            return
        self._closing.set()
        self._put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._leave_out(f"it has not ended within {CLOSE_S:g} s")

    def _put(self, line: Mapping[str, float] | None) -> None:
        if self._out.is_set():
            return
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._leave_out(f"{MOST_WAITING} steps wait for it")

    def _work(self) -> None:
        try:
            logger = self._start()
            while (line := self._lines.get()) is not None:
                logger.step(line)
            logger.close()
        except Exception as error:  # noqa: BLE001 - the failure of a logger is news, and never the run's
            self._leave_out(f"{type(error).__name__}: {error}")

    def _start(self) -> Logger:
        """The logger. A run that ends cuts the delays short."""
        for delay in START_DELAYS_S:
            try:
                return self._make(self._step)
            except Exception as error:  # noqa: BLE001 - reported; the last try below raises
                why = f"{type(error).__name__}: {error}"
                self._say(f"the logger {self._name} did not start ({why}); the next try is in {delay:g} s")
            self._closing.wait(delay)
        return self._make(self._step)

    def _leave_out(self, why: str) -> None:
        if not self._out.is_set():
            self._out.set()
            self._say(f"the logger {self._name} is left out from here on: {why}")

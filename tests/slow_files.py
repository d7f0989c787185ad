"""A file system that does not respond for a while: a named pipe, whose opening waits for a reader."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

LONGEST_S = 5.0
"""Time after which a write that blocks the event loop ends, so that the test can fail."""

_awaited: dict[str, threading.Event] = {}


@functools.cache
def _watch_openings() -> None:
    """An audit hook stays for the life of the process."""
    sys.addaudithook(_on_event)


def _on_event(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(arguments[0], str | Path) and str(arguments[0]) in _awaited:
        _awaited[str(arguments[0])].set()


class SlowFile:
    """A file on it. `reached` is set when it is opened; the write completes after `respond`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reached, self.responds = threading.Event(), threading.Event()
        self._content = b""
        os.mkfifo(path)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        self.responds.wait(LONGEST_S)
        self._content = self.path.read_bytes()

    def respond(self) -> None:
        """Let the write complete."""
        self.responds.set()

    def content(self) -> bytes:
        """What was written."""
        self._thread.join(LONGEST_S)
        return self._content


@contextlib.contextmanager
def slow_file(path: Path) -> Iterator[SlowFile]:
    """A slow file at `path`, which must not exist."""
    _watch_openings()
    slow = SlowFile(path)
    _awaited[str(path)] = slow.reached
    try:
        with mock.patch("tidegate.trainer.records.trajectories.sync"):  # a pipe cannot be synced
            yield slow
    finally:
        del _awaited[str(path)]
        slow.respond()
        with contextlib.suppress(OSError):  # no write came: nobody else opens the pipe
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))

"""Failpoints: named places at which tests kill a process, as by `kill -9`, to check its recovery.

`TIDEGATE_FAILPOINT=turn.committed:3` kills the process when it reaches this failpoint for the third time;
several are separated by commas. With the directory `TIDEGATE_FAILPOINTS_PASSED` each failpoint kills once
over all processes and restarts, and leaves a file with its name there. The variables are read once, at the
first failpoint; without them a failpoint costs one comparison.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "TIDEGATE_FAILPOINT"
PASSED = "TIDEGATE_FAILPOINTS_PASSED"


@functools.cache
def _armed() -> dict[str, int]:
    """Returns the active failpoints with the number of passes until they kill."""
    entries = [entry.partition(":") for entry in os.environ.get(VARIABLE, "").split(",") if entry]
    return {name: int(count or 1) for name, _, count in entries}


def reach(name: str) -> None:
    """Passes the failpoint `name`, which kills the process if it is active."""
    armed = _armed()
    if name in armed:
        armed[name] -= 1
        if armed[name] == 0 and _first(name):
            os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def around(name: str) -> Iterator[None]:
    """Passes the failpoints `<name>.before` and `<name>.after` around a durable write."""
    reach(f"{name}.before")
    yield
    reach(f"{name}.after")


def _first(name: str) -> bool:
    """Returns whether this failpoint kills for the first time, and records it."""
    directory = os.environ.get(PASSED)
    if directory is None:
        return True
    try:
        (Path(directory) / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

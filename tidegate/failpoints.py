"""Named places at which a process can be made to die, as by `kill -9`: tests look at what is left.

`TIDEGATE_FAILPOINT=turn.committed:3` kills the process the third time it passes the place of that name;
several are separated by commas. With `TIDEGATE_FAILPOINTS_PASSED`, a directory, each place kills once
over all processes and restarts: a file there of its name says that it did. The variables are read once, when
the first place is passed; without them a place costs one comparison.
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
    """Places that kill → how often they are passed until then."""
    told = [one.partition(":") for one in os.environ.get(VARIABLE, "").split(",") if one]
    return {name: int(count or 1) for name, _, count in told}


def reach(name: str) -> None:
    """Pass the place `name`; the process dies here if it was told to."""
    armed = _armed()
    if name in armed:
        armed[name] -= 1
        if armed[name] == 0 and _first(name):
            os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def around(name: str) -> Iterator[None]:
    """A durable write: the places `name.before` and `name.after`."""
    reach(f"{name}.before")
    yield
    reach(f"{name}.after")


def _first(name: str) -> bool:
    """Whether this place has not killed before; from now on it has."""
    directory = os.environ.get(PASSED)
    if directory is None:
        return True
    try:
        (Path(directory) / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

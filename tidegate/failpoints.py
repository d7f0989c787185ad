"""Named places at which a process can be made to die, as by `kill -9`: tests look at what is left.

`TIDEGATE_FAILPOINT=turn.committed:3` kills the process the third time it passes the place of that name.
The variable is read once, when the first place is passed; without it a place costs one comparison.
"""

from __future__ import annotations

import functools
import os
import signal
from dataclasses import dataclass

VARIABLE = "TIDEGATE_FAILPOINT"


@dataclass(slots=True)
class _Armed:
    name: str
    left: int


@functools.cache
def _armed() -> _Armed | None:
    name, _, count = os.environ.get(VARIABLE, "").partition(":")
    return _Armed(name, int(count or 1)) if name else None


def reach(name: str) -> None:
    """Pass the place `name`; the process dies here if it was told to."""
    armed = _armed()
    if armed is not None and armed.name == name:
        armed.left -= 1
        if armed.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

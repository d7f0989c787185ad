"""Runs a program that ends when its parent does: `python -m tidegate.tether PARENT COMMAND …`, by process id.

The kernel is asked to send SIGTERM when the parent dies, and then the command takes this process's place; the
request outlives the change. Linux only, where SGLang and vLLM run.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1


def tether(command: Sequence[str], parent: int) -> None:
    """Become `command`. Returns only where `parent` has died already; raises OSError where it can't run."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        raise OSError(ctypes.get_errno(), "the kernel can't tie a process to its parent (prctl)")
    if os.getppid() != parent:  # it died before the kernel was asked
        return
    os.execvp(command[0], list(command))


if __name__ == "__main__":
    tether(sys.argv[2:], int(sys.argv[1]))

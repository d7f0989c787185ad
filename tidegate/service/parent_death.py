"""Ties a process to its parent, through the kernel. Linux only, where SGLang and vLLM run.

    python -m tidegate.service.parent_death PARENT COMMAND …

runs a program that ends when its parent, given by process id, does.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
GRACE_S = 10.0
"""Seconds between SIGTERM and SIGKILL for a program whose parent has exited."""


def tether(command: Sequence[str], parent: int) -> None:
    """Replace this process by `command`, which gets SIGTERM when `parent` exits.

    A second process watches both: it continues a stopped command, and kills what is left of its process
    group after GRACE_S. Returns only where `parent` has exited already; raises OSError where the command
    cannot run.
    """
    signal_at_parent_exit(signal.SIGTERM)
    if os.getppid() != parent:  # it exited before the kernel was asked
        return
    _watch(parent, os.getpid())
    os.execvp(command[0], list(command))


def continue_at_parent_exit() -> None:
    """Let a stopped process (SIGSTOP) run again when its parent exits, so that it can read that its standard
    input has closed, and end. A running process does not notice."""
    if sys.platform == "linux":
        signal_at_parent_exit(signal.SIGCONT)


def signal_at_parent_exit(number: signal.Signals) -> None:
    """Raises OSError where the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, number) != 0:
        raise OSError(ctypes.get_errno(), "the kernel cannot tie a process to its parent (prctl)")


def _watch(parent: int, command: int) -> None:
    """Start the process that ends the command's process group after its parent."""
    try:
        fds = [os.pidfd_open(parent), os.pidfd_open(command)]
    except ProcessLookupError:  # the parent has just exited, and SIGTERM is on its way
        return
    if os.fork() != 0:
        for fd in fds:
            os.close(fd)
        return
    try:
        parent_exited, command_exited = os.dup2(fds[0], 0), os.dup2(fds[1], 1)
        os.closerange(2, os.sysconf("SC_OPEN_MAX"))  # an owner waits for the end of the command's output
        ended, _, _ = select.select([parent_exited, command_exited], [], [])
        if command_exited not in ended:
            os.kill(command, signal.SIGCONT)
            select.select([command_exited], [], [], GRACE_S)
            if os.getpgrp() == command:
                os.killpg(command, signal.SIGKILL)
            else:
                os.kill(command, signal.SIGKILL)
    finally:
        os._exit(0)


if __name__ == "__main__":
    tether(sys.argv[2:], int(sys.argv[1]))

"""Ties a process to its parent, through the kernel. Linux only, where SGLang and vLLM run.

    python -m tidegate.service.parent_death PARENT COMMAND …

runs a program that exits when its parent, given by process id, exits.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence

PR_SET_PDEATHSIG = 1
GRACE_S = 10.0
"""Seconds between SIGTERM and SIGKILL for a program whose parent has exited."""
EXIT_S = 5.0
"""Seconds in which a process may end after its parent's exit."""


def exec_tied_to_parent(command: Sequence[str], parent: int) -> None:
    """Replace this process by `command`, which gets SIGTERM when `parent` exits.

    A second process watches both: it resumes a stopped command and kills its remaining process group after
    GRACE_S. Returns only if `parent` has exited already; raises OSError if the command cannot run.
    """
    signal_at_parent_exit(signal.SIGTERM)
    if os.getppid() != parent:  # it exited before prctl
        return
    _watch(parent, os.getpid())
    os.execvp(command[0], list(command))


def continue_at_parent_exit() -> None:
    """Resume this process when its parent exits, in case it is stopped (SIGSTOP).

    It can then see that its standard input has closed, and exit.
    """
    if sys.platform == "linux":
        signal_at_parent_exit(signal.SIGCONT)


def end_with_parent(stop: Callable[[], object]) -> None:
    """Call `stop`, in a thread, when the parent exits and standard input closes with it.

    What hangs then keeps the process for EXIT_S at most.
    """

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        stop()
        time.sleep(EXIT_S)
        os._exit(0)

    continue_at_parent_exit()
    threading.Thread(target=watch, daemon=True, name="parent").start()


def signal_at_parent_exit(number: signal.Signals) -> None:
    """Send this process a signal when its parent exits; raises OSError if the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, number) != 0:
        raise OSError(ctypes.get_errno(), "the kernel cannot tie a process to its parent (prctl)")


def _watch(parent: int, command: int) -> None:
    """Start the process that kills the command's process group after the parent's exit."""
    try:
        fds = [os.pidfd_open(parent), os.pidfd_open(command)]
    except ProcessLookupError:  # the parent has exited, and SIGTERM is pending
        return
    if os.fork() != 0:
        for fd in fds:
            os.close(fd)
        return
    try:
        parent_exited, command_exited = os.dup2(fds[0], 0), os.dup2(fds[1], 1)
        os.closerange(2, os.sysconf("SC_OPEN_MAX"))  # else they keep the command's output open
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
    exec_tied_to_parent(sys.argv[2:], int(sys.argv[1]))

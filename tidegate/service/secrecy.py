"""Secrets of processes: how one is handed to a child, and what keeps other processes of the user from them.

A command line can be read by everyone, and a process's first environment by every process of its user: so
secrets pass through a socket that the child inherits.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import socket
import sys
from collections.abc import Mapping
from typing import Any

PR_SET_DUMPABLE = 4


def shield_process() -> None:
    """Keep this process's memory, environment and open files from all others but root's, those of the same
    user included (Linux), and what it writes from other users. Raises OSError where the kernel refuses."""
    os.umask(0o077)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "the kernel can't shield a process from others (prctl)")


async def hand_over(ours: socket.socket, secrets: Mapping[str, Any], timeout_s: float) -> None:
    """Send secrets to a child that has the socket's other end, which it reads with `received`."""
    ours.setblocking(False)
    # A child that died or hangs is found by whoever waits until it serves.
    with ours, contextlib.suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(timeout_s):
            await asyncio.get_running_loop().sock_sendall(ours, json.dumps(dict(secrets)).encode())


def received(fd: int) -> dict[str, Any]:
    """What the parent handed over; call `shield_process` before."""
    with socket.socket(fileno=fd) as theirs, theirs.makefile("rb") as whole:
        found: dict[str, Any] = json.loads(whole.read())
    return found

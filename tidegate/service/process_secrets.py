"""Passes secrets to child processes and protects a process from other processes of its user.

Every user can read a command line, and every process of the same user an initial environment; so secrets pass
through a socket that the child inherits.
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
    """Hide this process's memory, environment and open files from all processes but root's (Linux).

    Also makes the files that it writes unreadable to other users. Raises OSError if the kernel refuses.
    """
    os.umask(0o077)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "the kernel cannot shield this process from others (prctl)")


async def send_secrets(ours: socket.socket, secrets: Mapping[str, Any], timeout_s: float) -> None:
    """Send secrets to a child, which reads them from the socket's other end with `receive_secrets`."""
    ours.setblocking(False)
    # The caller detects a child that has exited or hangs.
    with ours, contextlib.suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(timeout_s):
            await asyncio.get_running_loop().sock_sendall(ours, json.dumps(dict(secrets)).encode())


def receive_secrets(fd: int) -> dict[str, Any]:
    with socket.socket(fileno=fd) as theirs, theirs.makefile("rb") as file:
        secrets: dict[str, Any] = json.loads(file.read())
    return secrets

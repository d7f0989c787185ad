"""Lock of a directory that one process at a time writes, such as a run's."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from tidegate.errors import StartError

FILE = ".tidegate.lock"
INHERITED = "TIDEGATE_LOCK_FD"
"""Environment variable with the descriptor of a lock that the parent process holds."""
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
PROBES, PROBE_S = 5, 0.05
"""Attempts to lock, as `refuse_if_in_use` holds a lock for a moment."""
LEASE_S = 120.0
"""Time after which a file server has released the locks of a machine that is lost (NFSv4: 90 s)."""


class DirectoryLock:
    """Exclusive lock of a directory, which is created if it does not exist.

    It is held until `close` or the exit of the process, however that exits. A child process shares it if it
    inherits the descriptor `fd`, with its number in the variable `INHERITED`.

    Args:
        directory: Directory to lock.
        command: Command of this process, which errors of other processes name.
        wait: Wait up to `LEASE_S` for a holder on another machine, which may be lost. Called with a message.

    Attributes:
        unsupported: A message if the file system has no locks, so that this lock excludes no process.

    Raises:
        StartError: Another process holds the lock, or the directory cannot be written.
    """

    def __init__(self, directory: Path, command: str, *, wait: Callable[[str], None] | None = None) -> None:
        self.directory = directory.absolute()
        self.unsupported: str | None = None
        self._command, self._inherited = command, False
        self._created = not self.directory.exists()
        deadline = time.monotonic() + LEASE_S
        while not self._acquire():
            holder = _holder(self.directory)
            elsewhere = holder and holder.get("host") != socket.gethostname()
            if wait is None or not elsewhere or time.monotonic() > deadline:
                raise StartError(_in_use(directory, holder))
            if deadline - time.monotonic() > LEASE_S - 1.0 - PROBES * PROBE_S:
                wait(f"{_in_use(directory, holder)}. Waiting for it up to {LEASE_S:g} s, as it may be lost")
            time.sleep(1.0)

    def _acquire(self) -> bool:
        """Take the lock; returns False if another process holds it."""
        path = self.directory / FILE
        if self._inherit(path):
            return True
        try:
            for _ in range(PROBES):
                self.directory.mkdir(parents=True, exist_ok=True)
                # NFSv4 grants an exclusive lock only to files that are open for writing.
                self.fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
                if self._try() and _is_at(self.fd, path):  # else the directory was renamed meanwhile
                    os.ftruncate(self.fd, 0)
                    os.pwrite(self.fd, json.dumps(_description(self._command)).encode(), 0)
                    return True
                os.close(self.fd)
                time.sleep(PROBE_S)
        except OSError as error:
            raise StartError(f"cannot lock {path}: {error.strerror or error}") from None
        return False

    def _inherit(self, path: Path) -> bool:
        with contextlib.suppress(OSError, ValueError):
            fd = int(os.environ.get(INHERITED, ""))
            if os.path.samestat(os.fstat(fd), path.stat()):
                os.set_inheritable(fd, False)
                self.fd, self._inherited = fd, True
        return self._inherited

    def _try(self) -> bool:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            self.unsupported = (
                f"the file system of {self.directory} has no file locks ({error.strerror}): another process "
                "that writes this directory is not refused, so start none"
            )
        return True

    def set_aside(self) -> Path | None:
        """Rename the directory to the first free `<name>.N`, and lock a new one in its place.

        Returns:
            The new name; None if this lock created the directory, which then stays.

        Raises:
            StartError: Another process has created and locked the directory meanwhile.
        """
        if self._created:
            return None
        number = 1
        while (aside := self.directory.with_name(f"{self.directory.name}.{number}")).exists():
            number += 1
        self.directory.rename(aside)
        os.close(self.fd)  # every later holder checks that the file is still in its place
        if not self._acquire():
            raise StartError(_in_use(self.directory, _holder(self.directory)))
        return aside

    def close(self) -> None:
        """Release the lock, and remove the directory if this lock created it and nothing is in it."""
        if not self._inherited:
            with contextlib.suppress(OSError):  # the directory was removed, or the disk is full
                os.ftruncate(self.fd, 0)
                if self._created and [path.name for path in self.directory.iterdir()] == [FILE]:
                    (self.directory / FILE).unlink()
                    self.directory.rmdir()
        os.close(self.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def refuse_if_in_use(path: Path) -> None:
    """Raises StartError if a process holds the lock of `path` or of a directory above it."""
    path = path.absolute()
    for directory in (path, *path.parents):
        try:
            fd = os.open(directory / FILE, os.O_RDWR)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartError(f"cannot write {path}: {_in_use(directory, _holder(directory))}") from None
        except OSError:  # no locks there
            continue
        finally:
            os.close(fd)


def in_use(directory: Path) -> bool:
    """Whether a process holds the lock of the directory or of one above it."""
    try:
        refuse_if_in_use(directory)
    except StartError:
        return True
    return False


def _description(command: str) -> dict[str, Any]:
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    return {"command": command, "pid": os.getpid(), "host": socket.gethostname(), "since": since}


def _holder(directory: Path) -> dict[str, Any]:
    """Returns the description of the holder; empty while it is written."""
    try:
        holder = json.loads((directory / FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return holder if isinstance(holder, dict) else {}


def _in_use(directory: Path, holder: dict[str, Any]) -> str:
    who = "another process"
    if {"command", "pid", "host", "since"} <= holder.keys():
        who = "{command} (process {pid} on {host}, started {since})".format_map(holder)
    instead = "wait until it ends, stop it, or choose another directory (run.name, --out)"
    return f"{directory} is in use by {who}: {instead}"


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False

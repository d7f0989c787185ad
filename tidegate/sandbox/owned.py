"""Names that show which process owns a folder or container, so that orphaned ones can be removed."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from pathlib import Path

PREFIX = "tidegate-sandbox-"


def owned_name() -> str:
    """Returns a new name that contains this process's id and start time."""
    return f"{PREFIX}{_machine()}-{os.getpid()}-{_started(os.getpid())}-{secrets.token_hex(6)}"


def is_orphan(name: str) -> bool:
    """Whether a name was made by `owned_name` in a process that has ended.

    False for names from other machines, pid namespaces and starts of the machine: their processes cannot be
    seen.
    """
    parts = name.removeprefix(PREFIX).split("-")
    if not name.startswith(PREFIX) or len(parts) != 4 or parts[0] != _machine():
        return False
    pid, started = parts[1:3]
    return pid.isdecimal() and started.isdecimal() and _started(int(pid)) != int(started)


def remove_orphans(folder: Path | None = None) -> list[Path]:
    """Removes the folders of processes that have ended; returns their paths."""
    orphans = [
        path for path in (folder or Path(tempfile.gettempdir())).glob(f"{PREFIX}*") if is_orphan(path.name)
    ]
    for path in orphans:
        shutil.rmtree(path, ignore_errors=True)
    return orphans


def _started(pid: int) -> int:
    """Returns the start of a process in clock ticks since the start of the machine; 0 if there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError):
        return 0


def _machine() -> str:
    """Returns a name for the pid namespace, which the ids of processes belong to."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().replace("-", "")
    return f"{boot[:8]}{os.stat('/proc/self/ns/pid').st_ino:x}"

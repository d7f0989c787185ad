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
    return f"{PREFIX}{os.getpid()}-{_started(os.getpid())}-{secrets.token_hex(6)}"


def is_orphan(name: str) -> bool:
    """Whether a name was made by `owned_name` in a process of this machine that has ended."""
    pid, _, rest = name.removeprefix(PREFIX).partition("-")
    started = rest.partition("-")[0]
    if not name.startswith(PREFIX) or not pid.isdecimal() or not started.isdecimal():
        return False
    return _started(int(pid)) != int(started)


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

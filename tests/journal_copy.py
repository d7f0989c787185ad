"""A copy of a journal that is in use, as `kill -9` would leave it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def copy_journal(journal: Path, to: Path) -> Path:
    """Copies the files of a journal at one moment; returns the copy.

    The gateway goes on writing: copied one by one, the database may be from before a checkpoint and its log
    from after it. So the files are read until two readings in a row are alike. SQLite makes `-shm` anew.
    """
    files = _read(journal)
    while (again := _read(journal)) != files:
        files = again
    return write_journal(to, files)


def write_journal(to: Path, files: Mapping[str, bytes]) -> Path:
    """Replaces the files of a directory; returns the directory."""
    to.mkdir(exist_ok=True)
    for old in to.iterdir():
        old.unlink()
    for name, content in files.items():
        (to / name).write_bytes(content)
    return to


def _read(journal: Path) -> dict[str, bytes]:
    files = {}
    for file in sorted(journal.iterdir()):
        if not file.name.endswith("-shm"):
            try:
                files[file.name] = file.read_bytes()
            except FileNotFoundError:  # removed since it was listed: the next reading differs
                continue
    return files

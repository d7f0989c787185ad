"""Public reports of runs that were harmed by a second start, or that did not recover from an early end."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from tidegate.service.directory_lock import FILE, DirectoryLock


def test_the_lock_is_taken_on_a_file_that_is_open_for_writing(tmp_path: Path) -> None:
    """alexflint/go-filemutex#24, openwrt/buildscripts#1"""
    with DirectoryLock(tmp_path, "tidegate train") as lock:
        assert fcntl.fcntl(lock.fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named_and_refuses_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """tox-dev/filelock#6, tox-dev/filelock#77, BOINC/boinc#1563"""

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with DirectoryLock(tmp_path, "tidegate train") as lock:
        assert lock.unsupported is not None
        assert os.strerror(number) in lock.unsupported
    assert (tmp_path / FILE).exists()

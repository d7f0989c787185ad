"""Public reports of runs that were harmed by a second start, or that did not recover from an early end."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from tidegate.config import load_settings
from tidegate.errors import StartError
from tidegate.service.directory_lock import FILE, DirectoryLock
from tidegate.trainer.start import Start


def test_two_runs_in_one_directory_exclude_each_other(tmp_path: Path) -> None:
    """meta-pytorch/torchtune#481, deepinv/deepinv#525, LibreYOLO/libreyolo#833"""
    with (
        DirectoryLock(tmp_path / "run", "tidegate train"),
        pytest.raises(StartError, match=f"process {os.getpid()} on .*, started"),
    ):
        DirectoryLock(tmp_path / "run", "tidegate train")


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


@pytest.mark.parametrize("left", ["config.toml", "checkpoints/step_2/model.safetensors"])
def test_a_restart_before_the_first_checkpoint_starts_anew(tmp_path: Path, left: str) -> None:
    """facebookresearch/metaseq#544, marin-community/levanter#991, facebookresearch/fairchem#1051"""
    settings = load_settings(None, [f"--model.path={tmp_path}", f"--run.dir={tmp_path}", "--run.name=run"])
    file = settings.run_dir / left
    file.parent.mkdir(parents=True)
    file.touch()
    assert Start.of(settings, resume="auto").step == 0

"""One process at a time writes a directory."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tidegate.errors import StartError
from tidegate.service.directory_lock import FILE, INHERITED, DirectoryLock, refuse_if_in_use

HOLD = """
import sys
from pathlib import Path
from tidegate.service.directory_lock import DirectoryLock
try:
    with DirectoryLock(Path(sys.argv[1]), "tidegate train"):
        print("holds", flush=True)
        sys.stdin.read()
except Exception as error:
    print(error, flush=True)
"""


def other(directory: Path, **options: object) -> subprocess.Popen[str]:
    """Another process, which locks the directory until its input ends."""
    return subprocess.Popen(  # type: ignore[call-overload,no-any-return]
        [sys.executable, "-c", HOLD, str(directory)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options,
    )  # fmt: skip


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_second_process_is_refused_with_the_holders_id_and_start(tmp_path: Path) -> None:
    place = tmp_path / "run"
    with other(place) as holder:
        assert said(holder) == "holds"
        with pytest.raises(
            StartError, match=rf"{place} is in use by tidegate train .process {holder.pid} on"
        ):
            DirectoryLock(place, "tidegate train")
        with pytest.raises(StartError, match=r"started \d{4}-\d\d-\d\d \d\d:\d\d:\d\d"):
            refuse_if_in_use(place / "checkpoints" / "step_2")
        assert (place / FILE).exists()
        refuse_if_in_use(tmp_path / "another")
        assert holder.stdin is not None
        holder.stdin.close()
    assert not place.exists(), "it was empty, and made by the lock"
    with DirectoryLock(place, "tidegate train"):
        (place / "config.toml").touch()
    assert place.exists()


def test_a_process_that_was_killed_holds_nothing(tmp_path: Path) -> None:
    place = tmp_path / "run"
    with other(place) as holder:
        assert said(holder) == "holds"
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        DirectoryLock(place, "tidegate train").close()


def test_a_directory_that_is_set_aside_keeps_its_files_and_the_new_one_is_locked(tmp_path: Path) -> None:
    place = tmp_path / "run"
    place.mkdir()
    (place / "config.toml").touch()
    with DirectoryLock(place, "tidegate train") as lock:
        assert lock.set_aside() == tmp_path / "run.1"
        (place / "new").touch()
        with other(place) as second, other(tmp_path / "run.1") as old:
            assert f"process {os.getpid()}" in said(second)
            assert said(old) == "holds"
            assert old.stdin is not None
            old.stdin.close()
    assert {path.name for path in place.iterdir()} == {FILE, "new"}
    with DirectoryLock(tmp_path / "none", "tidegate train") as lock:
        assert lock.set_aside() is None


def test_a_child_shares_the_lock_of_its_parent_and_keeps_it(tmp_path: Path) -> None:
    place = tmp_path / "run"
    lock = DirectoryLock(place, "tidegate serve")
    variables = {**os.environ, INHERITED: str(lock.fd)}
    with other(place, env=variables, pass_fds=[lock.fd]) as child:
        assert said(child) == "holds"
        (place / "file").touch()
        lock.close()
        with pytest.raises(StartError, match="is in use by another process"):
            DirectoryLock(place, "tidegate serve")
        assert child.stdin is not None
        child.stdin.close()
    DirectoryLock(place, "tidegate serve").close()


def test_a_holder_on_another_machine_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file server keeps the lock of a lost machine for a while."""
    with other(tmp_path) as holder:
        assert said(holder) == "holds"
        monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
        notes: list[str] = []

        def wait(text: str) -> None:
            notes.append(text)
            holder.kill()

        DirectoryLock(tmp_path, "tidegate train", wait=wait).close()
    assert [bool(re.search(rf"process {holder.pid} on .*Waiting for it", note)) for note in notes] == [True]


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartError, match=rf"cannot lock {tmp_path}/file/run/{FILE}: Not a directory"):
        DirectoryLock(tmp_path / "file" / "run", "tidegate train")

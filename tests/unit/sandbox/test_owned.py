"""Names of folders and containers show whether their owner still runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tidegate.sandbox.owned import is_orphan, owned_name, remove_orphans


def of_another_process() -> str:
    code = "from tidegate.sandbox.owned import owned_name; print(owned_name())"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_only_names_of_ended_processes_are_orphans() -> None:
    mine = owned_name()
    machine, _, started, number = mine.removeprefix("tidegate-sandbox-").split("-")
    assert not is_orphan(mine)
    assert is_orphan(of_another_process())
    assert is_orphan(f"tidegate-sandbox-{machine}-{os.getpid()}-{int(started) - 1}-{number}"), (
        "a pid used again"
    )
    assert not is_orphan(f"tidegate-sandbox-other-1-{started}-{number}"), "a process of another machine"
    for foreign in ("tidegate-sandbox-", "tidegate-sandbox-a-b-c-d", "something", mine + "-x"):
        assert not is_orphan(foreign)


def test_folders_of_ended_processes_are_removed(tmp_path: Path) -> None:
    mine, theirs = tmp_path / owned_name(), tmp_path / of_another_process()
    for folder in (mine, theirs, tmp_path / "other"):
        (folder / "below").mkdir(parents=True)
    assert remove_orphans(tmp_path) == [theirs]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([mine.name, "other"])

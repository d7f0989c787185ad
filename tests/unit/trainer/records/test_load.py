"""CPU time and memory of a run's processes, by the log that each writes to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import eventually
from tidegate.trainer.records import load
from tidegate.trainer.records.load import FILE, OLDER, LoadLog

CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
"""A process with a process of its own."""


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    (tmp_path / "logs").mkdir()
    with (tmp_path / "logs" / "engine.log").open("wb") as output:
        process = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stderr=output)
    yield process
    assert process.stdin is not None
    process.stdin.close()
    process.wait(20)


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / FILE).read_text().splitlines()]


async def test_a_process_counts_under_its_log_with_all_below_it(
    tmp_path: Path, engine: subprocess.Popen[bytes]
) -> None:
    record = LoadLog(tmp_path)
    record.sample()
    assert not (tmp_path / FILE).exists()

    def both_run() -> bool:
        record.sample()
        samples = [line["processes"] for line in lines(tmp_path)]
        used = sum(one["trainer"]["cpu"] for one in samples)  # the system counts it in hundredths of a second
        return used > 0 and bool(samples[-1].get("engine", {}).get("processes") == 2)

    await eventually(both_run)
    sums = lines(tmp_path)[-1]["processes"]
    assert set(sums) == {"trainer", "engine"}
    assert sums["trainer"]["memory"] > sums["engine"]["memory"] > 1_000_000


def test_the_file_is_rotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "MOST_BYTES", 10)
    record = LoadLog(tmp_path)
    for _ in range(4):
        record.sample()
    assert len(lines(tmp_path)) == 1
    assert len((tmp_path / OLDER).read_text().splitlines()) == 1


async def test_without_procfs_nothing_is_recorded(tmp_path: Path) -> None:
    await LoadLog(tmp_path, proc=tmp_path / "proc").watch()
    assert os.listdir(tmp_path) == []


async def test_a_file_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await LoadLog(tmp_path / "gone").watch(every_s=0.001)
    assert "no longer recorded" in caplog.text

"""A run with two gateway shards, one of which is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.runs import gone, held, training

pytestmark = pytest.mark.slow


def shards_of(front: int) -> dict[int, int]:
    """The pid of each shard, by index."""
    found = {}
    for pid in Path(f"/proc/{front}/task/{front}/children").read_text().split():
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        if "--shard" in words:
            found[int(words[words.index("--shard") + 1].partition("/")[0])] = int(pid)
    return found


def test_a_killed_shard_restarts_and_the_run_continues(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with training(run_dir, "--trainer.steps=5", "--eval.tasks=4", "--gateway.shards=2") as run:
        run.until_step(1)
        first = shards_of(run.owned("gateway"))
        assert first.keys() == {0, 1}
        os.kill(first[1], signal.SIGKILL)
        run.until(lambda: shards_of(run.owned("gateway")).get(1, first[1]) != first[1])
        later = shards_of(run.owned("gateway"))
        assert run.wait() == 0, run.output()
        assert all(gone(pid) for pid in later.values())
    audit = held(run_dir)
    assert audit.groups["trained"] == 5 * 4
    assert audit.groups["live"] == audit.groups["failed"] == 0
    assert audit.attempts["failed"] == 0, "agents saw a slow answer, not an error"

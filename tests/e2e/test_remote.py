"""A short run with a sharded gateway, whose agents run in two worker processes; one of them is killed."""

from __future__ import annotations

import contextlib
import json
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.runs import ENVIRONMENT, REPO, TrainProcess, held, ledger, metrics, training

pytestmark = pytest.mark.slow
REMOTE = [
    "--agent.source=remote", "--agent.heartbeat_s=1", "--trainer.steps=4", "--eval.every=0",
    "--gateway.shards=2",
]  # fmt: skip


@contextlib.contextmanager
def worker(run: TrainProcess, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    address = run.run_dir / "logs" / "gateway.address"
    key = run.run_dir / "worker.key"
    run.until(lambda: address.exists() and key.exists())
    url = json.loads(address.read_text())["url"]
    command = [sys.executable, "-m", "tidegate", "worker", "--gateway", url, "--key-file", str(key)]
    with open(log, "wb") as out:
        process = subprocess.Popen(
            [*command, "--agent", "solver"], cwd=REPO, stdout=out, stderr=out, env=ENVIRONMENT
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_run_trains_on_the_attempts_of_workers_and_outlasts_the_loss_of_one(tmp_path: Path) -> None:
    with training(tmp_path / "run", *REMOTE) as run:
        run.until_said("waiting for workers: none is connected")
        assert "tidegate worker --gateway http://" in run.output()
        assert stat.S_IMODE((tmp_path / "run" / "worker.key").stat().st_mode) == 0o600
        with worker(run, tmp_path / "one.log") as one, worker(run, tmp_path / "two.log") as two:
            run.until_step(1)
            one.kill()
            assert run.wait(600) == 0, run.output()[-3000:]
            two.send_signal(signal.SIGINT)
            assert two.wait(60) == 0
    held(tmp_path / "run")
    assert metrics(tmp_path / "run")[-1]["step"] == 4
    entries = ledger(tmp_path / "run")
    assert not [one for one in entries if one["event"] == "quarantined"]
    failures = {one.get("outcome") for one in entries if one.get("state") == "failed"}
    assert failures <= {"infra_error"}, "the loss of a worker is no fault of a task"

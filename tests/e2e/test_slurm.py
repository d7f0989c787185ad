"""examples/slurm/train.sbatch: the run trains, stops before the time limit, is requeued and continues."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.e2e.runs import SMALL, held, metrics
from tests.e2e.test_compose import free_port
from tests.slurm import cluster, job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
CONFIG = "examples/demo/config.toml"
NODES = ["127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4"]


def test_a_job_trains_with_engines_and_workers_on_other_nodes_and_continues_after_a_requeue(
    tmp_path: Path,
) -> None:
    script = cluster(tmp_path)
    run, log = tmp_path / "runs" / "mine", tmp_path / "job.log"
    words = ["mine", CONFIG, *SMALL[1:], "--trainer.steps=1000"]
    ports = {"WORKERS": "1", "PORT": str(free_port()), "GATEWAY_PORT": str(free_port())}
    with job(script, NODES, *words, **ports) as running:
        deadline = time.monotonic() + 200
        while not metrics(run) or metrics(run)[-1]["step"] < 2:
            assert running.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)  # polling a file that another process writes
        running.send_signal(signal.SIGUSR1)
        assert running.wait(60) == 130, log.read_text()
    assert (tmp_path / "requeued").read_text() == "7\n"
    stopped = held(run).steps
    assert stopped >= 2
    used = {
        name for name in ("127.0.0.2", "127.0.0.3") if (tmp_path / f"runs/logs/engine-{name}.log").exists()
    }
    assert len(used) == 2

    (tmp_path / "requeued").unlink()
    with job(script, NODES, *words[:-1], f"--trainer.steps={stopped + 2}", **ports) as running:
        assert running.wait(200) == 0, log.read_text()
    assert held(run).steps == stopped + 2
    assert not (tmp_path / "requeued").exists()
    assert "worker" in (tmp_path / "runs/logs/worker-127.0.0.4.log").read_text()

"""A SGLang server on another node of a Ray cluster, with a network of its own and without the run's files."""

from __future__ import annotations

import os
import signal

import pytest

from tests.e2e.runs import held, metrics, training
from tests.engine_runs import through
from tests.ray_cluster import SEATS, may_hide, nothing_left, ray_cluster
from tests.sglang.conftest import ARGUMENTS

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not may_hide(), reason="nodes have mounts and networks of their own"),
]


def test_a_server_on_another_node_serves_what_is_published_and_comes_back(python: str) -> None:
    with ray_cluster() as cluster:
        run_dir = cluster.runs / "sglang"
        arguments = [
            "--cluster", cluster.address, "--trainer.steps=1000",
            "--trainer.publish_transport=broadcast", *SEATS, *through("sglang", python, ARGUMENTS),
        ]  # fmt: skip
        with training(run_dir, *arguments, environment=cluster.environment) as run:
            run.until_step(2)
            assert "read from files" not in run.output(), "they came over a process group"
            server = cluster.pid("sglang.launch_server")
            os.kill(server, signal.SIGKILL)
            run.until_said("the engine is back at version")
            lost_at = metrics(run_dir)[-1]["step"]
            run.until_step(lost_at + 2)
            run.interrupt()
            assert run.wait(90) == 130, run.output()
        assert nothing_left(cluster, "sglang")
        errors = [line["logprob_max_error"] for line in metrics(run_dir)[1:]]
        assert max(error or 0 for error in errors) < 1e-3, "sampled with what was published"
        assert (run_dir / "logs" / "engine.log").exists(), "the log of the other node is here"
        held(run_dir)

"""The commands of examples/skypilot/train.yaml on loopback: two nodes, and a second job."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from docs.checks.commands import workplace
from tests import REPO
from tests.e2e.runs import ENVIRONMENT, SMALL, held
from tests.e2e.test_compose import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]
TASK = yaml.safe_load((REPO / "examples/skypilot/train.yaml").read_text())
NODES = ["127.0.0.1", "127.0.0.2"]


@contextlib.contextmanager
def nodes(folder: Path, script: str, **environment: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Runs the task's commands for each node; their processes end with the block."""
    common = {
        **ENVIRONMENT, **TASK["envs"], **environment, "SKYPILOT_NODE_IPS": "\n".join(NODES),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip
    running = []
    for rank in range(len(NODES)):
        with (folder / f"{rank}.log").open("ab") as log:
            running.append(subprocess.Popen(
                ["bash", "-c", script], cwd=folder, env={**common, "SKYPILOT_NODE_RANK": str(rank)},
                stdout=log, stderr=log, start_new_session=True,
            ))  # fmt: skip
    try:
        yield running
    finally:
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)


def test_a_job_trains_with_an_engine_on_another_node_and_a_later_job_continues_it(tmp_path: Path) -> None:
    workplace(tmp_path)
    (tmp_path / "volume").mkdir()
    for job, steps in enumerate((2, 4)):
        small = " ".join([*SMALL[1:], f"--trainer.steps={steps}"])
        script = TASK["run"].replace("/runs", str(tmp_path / "volume")).replace("30000", str(free_port()))
        script = script.replace('"${words[@]}"', f'"${{words[@]}}" {small}')
        with nodes(tmp_path, script, SKYPILOT_TASK_ID=f"job-{job}") as running:
            assert [process.wait(200) for process in running] == [0, 0], (tmp_path / "0.log").read_text()
        assert held(tmp_path / "volume" / "demo").steps == steps
    assert "resumed from step 2" in (tmp_path / "0.log").read_text()

"""The agents of examples/frameworks, trained for two steps with settings only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.support import ENVIRONMENTS, REPO
from tests.e2e.runs import SMALL, held, metrics

pytestmark = [pytest.mark.clients, pytest.mark.timeout(700)]
EXAMPLE = Path("examples", "frameworks")


@pytest.mark.parametrize("agent", ["openai_agents", "langgraph_agent"])
def test_an_agent_of_a_framework_is_trained(tmp_path: Path, agent: str) -> None:
    # as if the framework were installed beside Tidegate
    [beside] = (ENVIRONMENTS / "frameworks" / "lib").glob("python*/site-packages")
    run = subprocess.run(
        [
            sys.executable, "-m", "tidegate", "train", str(EXAMPLE / "config.toml"),
            f"--agent.use={EXAMPLE / agent}.py:agent", f"--run.dir={tmp_path}", f"--run.name={agent}",
            *SMALL, "--trainer.steps=2", "--agent.max_concurrency=8",
        ],
        cwd=REPO, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(beside), str(REPO)))},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    held(tmp_path / agent)
    steps = [line for line in metrics(tmp_path / agent) if line["step"] > 0 and "loss" in line]
    assert len(steps) == 2
    assert all(line["mismatch_kl"] < 1e-3 for line in steps)

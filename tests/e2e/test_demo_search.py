"""The search demo as in `make demo-search`: a real retrieval server and run, and no leftover processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import ENVIRONMENT, REPO, SMALL, gone, held, metrics


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_small_run_of_the_search_demo(tmp_path: Path) -> None:
    command = [sys.executable, "examples/demo_search/demo.py", f"--run.dir={tmp_path}", "--run.name=search"]
    done = subprocess.run(
        [*command, *SMALL, "--trainer.steps=3"],
        cwd=REPO, env=ENVIRONMENT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run_dir = tmp_path / "search"
    lines = metrics(run_dir)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert {"eval/reward", "eval/reward_greedy", "eval/reward_three_hops"} <= set(lines[0])
    assert lines[0]["eval/reward"] > 0
    assert all(line["eval/failed"] == 0 for line in (lines[0], lines[-1]))
    assert all(line["episode/retrieval_recall"] > 0.3 for line in lines[1:])
    assert held(run_dir).groups["trained"] == 12
    assert (run_dir / "report.html").exists()
    server = json.loads((tmp_path / "search-corpus" / "logs" / "rag.address").read_text())
    assert gone(server["pid"])


def test_invalid_settings_are_refused_before_anything_starts(tmp_path: Path) -> None:
    command = [sys.executable, "examples/demo_search/demo.py", f"--run.dir={tmp_path}", "--agent.optoins.k=2"]
    done = subprocess.run(command, cwd=REPO, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "there is no setting 'agent.optoins'; did you mean 'agent.options'?" in done.stderr
    assert list(tmp_path.iterdir()) == []

"""A judge that is out of order quarantines no task, also when the run is killed meanwhile.

Tasks that fail by themselves are quarantined, and a person lifts that with `tidegate tasks`.
"""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import ENVIRONMENT, REPO, held, ledger, metrics, training
from tidegate.trainer.ledger.state import read_ledger_state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

JUDGED = """
import urllib.request
from tidegate.envs.arithmetic import Arithmetic
from tidegate.envs.rewards import Reward, exact_answer

def judged(output, answer):
    urllib.request.urlopen("{url}", timeout=5.0)
    return exact_answer(output, answer)

class Judged(Arithmetic):
    rewards = (Reward("judged", judged),)
"""
RAISING = """
import zlib
from tidegate.agents.solver import Solver

class Raising(Solver):
    async def run(self, task, session):
        if "train" in task.id and zlib.crc32(task.id.encode()) % 8 == 0:
            raise RuntimeError("this task always raises")
        return await super().run(task, session)
"""


class Judge:
    """An HTTP server that can be stopped and started again at its port."""

    def __init__(self) -> None:
        self._port = 0
        self.start()
        self.url = f"http://127.0.0.1:{self._port}/"

    def start(self) -> None:
        class Yes(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", self._port), Yes)
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def tasks(run_dir: Path, *arguments: str) -> list[dict[str, Any]]:
    """The output of `tidegate tasks`, as objects if it has `--json`."""
    done = subprocess.run(
        [sys.executable, "-m", "tidegate", "tasks", str(run_dir), *arguments],
        cwd=REPO, env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()] if "--json" in arguments else []


def events(run_dir: Path, event: str) -> list[dict[str, Any]]:
    return [line for line in ledger(run_dir) if line["event"] == event]


def test_a_judge_that_is_down_quarantines_no_task_and_a_person_lifts_quarantines(tmp_path: Path) -> None:
    judge, run_dir = Judge(), tmp_path / "run"
    (tmp_path / "judged.py").write_text(JUDGED.format(url=judge.url))
    (tmp_path / "raising.py").write_text(RAISING)
    arguments = [
        f"--env.use={tmp_path}/judged.py:Judged", f"--agent.use={tmp_path}/raising.py:Raising",
        "--trainer.max_attempts=1", "--trainer.min_group_size=2", "--eval.every=0", "--eval.tasks=4",
    ]  # fmt: skip
    with training(run_dir, "--trainer.steps=40", *arguments) as run:
        run.until(lambda: run_dir.exists() and len(metrics(run_dir)) > 2)
        run.until(lambda: bool(events(run_dir, "quarantined")))
        judge.stop()
        run.until(lambda: bool(events(run_dir, "paused")))
        run.kill()
    before = read_ledger_state(run_dir / "ledger.jsonl")
    steps = metrics(run_dir)[-1]["step"] + 2
    with training(run_dir, f"--trainer.steps={steps}", *arguments, "--resume") as run:
        run.until(lambda: len(events(run_dir, "paused")) >= 2)
        lifted = tasks(run_dir, "--quarantined", "--json")[0]["task"]
        tasks(run_dir, "--lift", lifted)
        run.until(lambda: [line["task"] for line in events(run_dir, "lifted")] == [lifted])
        judge.start()
        assert run.wait() == 0, run.output()
    said = " ".join(run.output().split())
    first = min(before.quarantined)
    assert f"in quarantine and not issued: {first}" in said
    assert f"tidegate tasks {run_dir} --lift TASK" in said
    held(run_dir)
    assert len(events(run_dir, "started")) == 2
    blamed = events(run_dir, "quarantined")
    assert {line["outcome"] for line in blamed} == {"agent_error"}
    assert all("this task always raises" in line["why"] for line in blamed)
    after = read_ledger_state(run_dir / "ledger.jsonl")
    assert after.failures()["infra_error"] >= 16, "each outage is suspected after eight"
    assert after.failures() >= before.failures()
    assert not any(cause.startswith("reward_error") for cause in after.failures())
    last = {key: value for key, value in metrics(run_dir)[-1].items() if key.startswith("failures/")}
    assert last.keys() == {f"failures/{cause}" for cause in after.failures()}

    listed = {one["task"]: one for one in tasks(run_dir, "--json")}
    quarantined = {name for name, one in listed.items() if one["quarantined"] is not None}
    assert quarantined == after.quarantined
    assert sum(one["trained"] for one in listed.values()) == held(run_dir).groups["trained"]
    tasks(run_dir, "--lift", "--all")
    assert all(one["lift_requested"] for one in tasks(run_dir, "--quarantined", "--json"))
    with training(run_dir, f"--trainer.steps={steps + 1}", *arguments, "--resume") as run:
        assert run.wait() == 0, run.output()
        assert "not issued" not in run.output().rpartition("resumed from step")[2], "all are lifted"
    judge.stop()
    assert {line["task"] for line in events(run_dir, "lifted")} >= quarantined
    assert not list((run_dir / "lifts").iterdir())
    held(run_dir)

"""Faults during runs: processes killed with `kill -9`, and agents that sometimes fail."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from pathlib import Path

import pytest

from tests.e2e.runs import ENVIRONMENT, TrainProcess, gone, held, ledger, metrics, training
from tidegate.errors import StartError
from tidegate.service.api_key import ENGINE_KEY
from tidegate.trainer.processes.servers import MAX_RESTARTS

pytestmark = pytest.mark.slow
KEY = "of-the-test"


def test_one_of_two_engines_is_killed_and_the_run_continues_with_both(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    environment = {**ENVIRONMENT, ENGINE_KEY: KEY}
    with training(run_dir, "--engine.count=2", "--trainer.steps=1000", environment=environment) as run:
        run.until_step(3)
        first = run.owned("engine-1")
        os.kill(first, signal.SIGKILL)
        run.until_said("the engine-1 is back")
        assert run.owned("engine-1") != first
        run.until(lambda: all(sampled_by(run, name) > 500 for name in ("engine-1", "engine-2")))
        run.interrupt()
        assert run.wait() == 130, run.output()
        assert all(gone(run.owned(name)) for name in ("engine-1", "engine-2", "gateway"))
    audit = held(run_dir)
    assert audit.groups["trained"] == audit.steps * 4
    assert audit.attempts["failed"] == 0, "agents saw a slow answer, not an error"
    assert max(line["logprob_max_error"] or 0 for line in metrics(run_dir)[1:]) < 1e-3


def sampled_by(run: TrainProcess, engine: str) -> int:
    """Tokens that an engine has sampled since its start."""
    url = json.loads((run.run_dir / "logs" / f"{engine}.address").read_text())["url"]
    request = urllib.request.Request(f"{url}/model_info", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=10) as reply:
        return int(json.load(reply)["tokens_sampled"])


def test_killed_servers_restart_and_the_run_continues(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with training(run_dir, "--trainer.steps=9") as run:
        run.until_step(1)
        first = run.owned("engine")
        for step, name, times in ((1, "gateway", 1), (3, "engine", 1), (5, "gateway", 2)):
            run.until_step(step)
            os.kill(run.owned(name), signal.SIGKILL)
            run.until_said(f"the {name} is back", times=times)
        assert run.wait() == 0, run.output()
        assert run.owned("engine") != first
    audit = held(run_dir)
    assert audit.groups["trained"] == 9 * 4
    assert audit.groups["live"] == audit.groups["failed"] == 0
    assert audit.attempts["failed"] == 0, "agents saw a slow answer, not an error"
    assert [line["step"] for line in metrics(run_dir)] == list(range(10))
    errors = [line["logprob_max_error"] or 0 for line in metrics(run_dir)[1:]]
    assert max(errors) < 1e-3, "the engine came back at the current version"


def test_a_gateway_that_keeps_dying_stops_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with training(run_dir, "--trainer.steps=1000") as run:
        run.until_step(2)
        for restart in range(1 + MAX_RESTARTS):
            os.kill(run.owned("gateway"), signal.SIGKILL)
            if restart < MAX_RESTARTS:
                run.until_said("the gateway is back", times=restart + 1)
        assert run.wait(60) == StartError.exit_code, run.output()
    said = " ".join(run.output().split())
    assert f"the gateway was killed by SIGKILL, after {MAX_RESTARTS} restarts" in said
    assert "--resume" in said
    before = held(run_dir)
    assert before.groups["stepped"] == before.groups["live"] == 0
    with training(run_dir, f"--trainer.steps={before.steps + 2}", "--resume") as run:
        assert run.wait() == 0, run.output()
    assert held(run_dir).groups["trained"] == before.groups["trained"] + 8


def test_a_killed_trainer_leaves_no_process_and_is_resumed(tmp_path: Path) -> None:
    """Engine and gateway are stopped (SIGSTOP) during the kill and cannot notice that their input closes."""
    run_dir = tmp_path / "run"
    with training(run_dir, "--trainer.steps=1000", "--trainer.checkpoint_every=2") as run:
        run.until_step(5)
        children = [run.owned("engine"), run.owned("gateway")]
        for child in children:
            os.kill(child, signal.SIGSTOP)
        run.kill()
        assert all(gone(child) for child in children)
    dead, before = held(run_dir), metrics(run_dir)[-1]
    assert dead.groups["live"] > 0
    with training(run_dir, "--trainer.steps=8", "--resume") as run:
        assert run.wait() == 0, run.output()
    audit, lines = held(run_dir), metrics(run_dir)
    assert [line["step"] for line in lines] == list(range(9))
    assert lines[-1]["version"] > before["version"] + 8 - before["step"], (
        "restored weights have a version of their own"
    )
    assert audit.groups["trained"] == 8 * 4, "each step of the surviving lineage counts once"
    assert audit.groups["live"] == 0
    assert audit.groups["stepped"] == 0, "what lay behind the marker was put back and ended once more"
    again = [one for one in ledger(run_dir) if one["event"] == "put_back"]
    assert len(again) == dead.groups["stepped"] > 0
    assert re.search(r"\d+ continue, \d+ are stale", " ".join(run.output().split()))
    said = " ".join(run.output().split())
    assert "trainer.steps 1000 → 8" in said
    assert "the ledger is consistent" in said
    assert "the ledger is inconsistent" not in said


def test_a_second_ctrl_c_stops_at_once_and_nothing_outlives_it(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with training(run_dir, "--trainer.steps=1000", "--trainer.checkpoint_every=1") as run:
        run.until_step(2)
        children = [run.owned("engine"), run.owned("gateway")]
        run.interrupt()
        run.until_said("Ctrl-C again exits at once")
        run.interrupt()
        assert run.wait(20) == 130, run.output()
        assert all(gone(child) for child in children)
    steps = held(run_dir).steps
    with training(run_dir, f"--trainer.steps={steps + 1}", "--resume") as run:
        assert run.wait() == 0, run.output()
    assert held(run_dir).groups["live"] == 0


FLAKY = """
import asyncio, hashlib, os, sys
from tidegate.agents.solver import Solver

class Flaky(Solver):
    async def run(self, task, session):
        kind = int(hashlib.sha256(task.id.encode()).hexdigest(), 16) % 20
        if kind in (0, 1) and session.seed % 2:
            raise ValueError("flaky on purpose")
        if kind == 2:
            await asyncio.Event().wait()
        if kind == 3:
            print("x" * 100_000)
        return await super().run(task, session)
"""


def test_failures_are_retried_quarantined_and_never_trained_as_zero(tmp_path: Path) -> None:
    (tmp_path / "flaky.py").write_text(FLAKY)
    run_dir = tmp_path / "run"
    with training(
        run_dir, "--trainer.steps=6", f"--agent.use={tmp_path}/flaky.py:Flaky", "--agent.deadline_s=10",
        "--trainer.max_attempts=2",
    ) as run:  # fmt: skip
        assert run.wait(200) == 0, run.output()
    audit = held(run_dir)
    assert audit.groups["trained"] == 6 * 4
    assert audit.attempts["failed"] > 0
    for path in (run_dir / "trajectories").glob("step_*.jsonl"):
        for line in path.read_text().splitlines():
            assert json.loads(line)["outcome"] in ("completed", "truncated")
    quarantined = [
        one
        for one in map(json.loads, (run_dir / "ledger.jsonl").read_text().splitlines())
        if one["event"] == "quarantined"
    ]
    assert all(one["why"] for one in quarantined)


def test_publish_interval_keeps_the_bound(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with training(
        run_dir, "--trainer.steps=6", "--trainer.publish_interval=2", "--trainer.max_staleness=1"
    ) as run:
        assert run.wait() == 0, run.output()
    audit = held(run_dir)
    assert audit.versions == 3
    assert audit.oldest_staleness is not None
    assert audit.oldest_staleness <= 1

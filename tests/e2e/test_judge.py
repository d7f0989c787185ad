"""A run whose judge ranks groups, whose gateway and trainer are killed while a group is ranked."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import held, ledger, metrics, training
from tests.scripted_judge import ATTEMPT, judge_in_thread

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
PLACES = 8


def by_text(body: Mapping[str, Any]) -> str:
    """Scores that depend on an attempt's text alone."""
    attempts = ATTEMPT.findall(body["messages"][-1]["content"])
    return json.dumps(
        {"scores": {name: zlib.crc32(text.encode()) % PLACES / PLACES for name, text in attempts}}
    )


def test_each_trained_reward_has_its_ranking_once_though_processes_are_killed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with judge_in_thread() as judge:
        judge.reply = by_text
        settings = [
            f"--env.judge.url={judge.url}", "--env.judge.model=m", "--env.judge.rubric=r",
            "--env.judge.kind=ranking", "--eval.every=0", "--trainer.dynamic_sampling=false",
        ]  # fmt: skip
        with training(run_dir, *settings, "--trainer.steps=100") as run:
            run.until_step(1)
            judge.hold = asyncio.Event()
            run.until(lambda: judge.running > 0)
            os.kill(run.owned("gateway"), signal.SIGKILL)
            judge.release()
            run.until_step(3)
            judge.hold = asyncio.Event()
            run.until(lambda: judge.running > 0)
            run.kill()
            judge.release()
        with training(run_dir, *settings, "--trainer.steps=5", "--resume") as run:
            assert run.wait(timeout=300) == 0, run.output()[-3000:]
    audit = held(run_dir)
    assert audit.groups["failed"] == 0
    assert [line["step"] for line in metrics(run_dir)] == [0, 1, 2, 3, 4, 5]
    assert any("judge/calls" in line for line in metrics(run_dir))
    trained = [
        json.loads(line)
        for path in (run_dir / "trajectories").glob("step_*.jsonl")
        for line in path.read_text().splitlines()
    ]
    for episode in trained:
        if episode["state"] == "stepped":
            own, ranked = episode["metrics"]["judge/environment"], episode["reward_parts"]["judge"]
            assert episode["reward"] == pytest.approx(own + ranked)
    assert "reward_error" not in {line.get("outcome") for line in ledger(run_dir)}
    assert (run_dir / "judge.sqlite").exists()

"""The demo's agent learns through a SGLang server that the run started, whatever is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.runs import gone, held, metrics, training
from tests.sglang.conftest import ARGUMENTS

pytestmark = pytest.mark.timeout(1200)


def through_sglang(python: str) -> list[str]:
    words = ", ".join(f'"{word}"' for word in ARGUMENTS)
    return ["--engine.kind=sglang", f"--engine.python={python}", f"--engine.arguments=[{words}]"]


def test_the_demo_learns_and_a_killed_server_comes_back(tmp_path: Path, python: str) -> None:
    """The demo's own batches and learning rate over fewer steps, with publishes under running requests."""
    run_dir = tmp_path / "run"
    demo = [
        "--trainer.steps=28", "--trainer.groups_per_batch=16", "--trainer.group_size=8",
        "--agent.max_concurrency=128", "--eval.tasks=128", "--eval.every=0", "--trainer.checkpoint_every=20",
    ]  # fmt: skip
    with training(run_dir, *through_sglang(python), *demo) as run:
        run.until_step(3, timeout=300)
        first = run.owned("engine")
        os.kill(first, signal.SIGKILL)
        run.until_said("the engine is back at version", timeout=180)
        assert run.owned("engine") != first
        assert run.wait(timeout=900) == 0, run.output()[-3000:]
    lines = metrics(run_dir)
    assert lines[-1]["eval/reward"] >= 0.85
    assert max(line["logprob_max_error"] for line in lines[1:]) < 1e-3
    assert any(line["weight_version/mixed_turn_ratio"] > 0 for line in lines[1:])
    audit = held(run_dir)
    assert audit.oldest_staleness is not None
    assert audit.oldest_staleness <= 2
    assert gone(run.owned("engine"))


def test_the_server_ends_with_a_killed_run_which_goes_on(tmp_path: Path, python: str) -> None:
    run_dir = tmp_path / "run"
    with training(run_dir, *through_sglang(python), "--trainer.steps=1000") as run:
        run.until_step(3, timeout=300)
        server = run.owned("engine")
        run.kill()
        assert gone(server)
    with training(run_dir, *through_sglang(python), "--trainer.steps=6", "--resume") as run:
        assert run.wait(timeout=300) == 0, run.output()[-3000:]
    assert [line["step"] for line in metrics(run_dir)] == [0, 1, 2, 3, 4, 5, 6]
    held(run_dir)

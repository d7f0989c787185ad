"""A real run with two loggers, one of which cannot write."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import ENVIRONMENT, held, metrics, training

pytestmark = pytest.mark.slow


def test_a_run_outlives_its_logger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVIRONMENT, "WANDB_MODE", "offline")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "tensorboard").write_text("where its directory should be")
    with training(run_dir, "--trainer.steps=2", "--run.loggers=['tensorboard', 'wandb']") as run:
        assert run.wait() == 0, run.output()[-3000:]
    output = " ".join(run.output().split())
    assert output.count("the logger tensorboard is disabled") == 1, output
    assert "the logger wandb" not in output
    assert [line["step"] for line in metrics(run_dir)] == [0, 1, 2]
    assert held(run_dir).groups["trained"] == 8
    (written,) = run_dir.glob("wandb/offline-run-*/run-*.wandb")
    assert b"weight_version/mixed_ratio" in written.read_bytes()

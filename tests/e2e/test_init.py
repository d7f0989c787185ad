"""The first commands of a new user, from `tidegate init` to a run with rising reward."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tidegate.scaffold.example_files import TINY_BASE


def typed(*words: str, cwd: Path, timeout_s: float) -> str:
    """The output of a command; fails the test if its exit code is not 0."""
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(params=["words", "tiny", "stateful"])
def project(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    flags = [] if request.param == "words" else [f"--{request.param}"]
    typed("tidegate", "init", "mine", *flags, cwd=tmp_path, timeout_s=60)
    return tmp_path / "mine"


def test_its_own_test_passes_at_once(project: Path) -> None:
    assert "passed" in typed("pytest", "-q", "-c", os.devnull, "--rootdir", ".", cwd=project, timeout_s=60)


@pytest.mark.slow
@pytest.mark.parametrize("project", ["stateful"], indirect=True)
def test_a_stateful_one_passes_the_doctor_and_trains(project: Path) -> None:
    assert "no problem found" in typed("tidegate", "doctor", cwd=project, timeout_s=300)
    small = ["--trainer.steps=3", "--eval.every=0", "--eval.tasks=8"]
    typed("tidegate", "train", "config.toml", *small, cwd=project, timeout_s=600)
    rows = [json.loads(line) for line in (project / "runs/mine/metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 3
    assert rows[-1]["tools/calculator_calls"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("project", ["tiny"], indirect=True)
def test_its_reward_rises(project: Path) -> None:
    typed("tidegate", "train", "config.toml", "--trainer.until=0.8", cwd=project, timeout_s=1200)
    rows = [json.loads(line) for line in (project / "runs/mine/metrics.jsonl").read_text().splitlines()]
    rewards = [row["eval/reward"] for row in rows if "eval/reward" in row]
    assert 0.05 <= rewards[0] <= 0.6
    assert rewards[-1] >= 0.8


@pytest.mark.slow
@pytest.mark.parametrize("project", ["words"], indirect=True)
def test_one_for_a_language_model_is_warmed_up_and_trained(project: Path) -> None:
    """With another model: the language model would have to be fetched."""
    small = [
        "--trainer.steps=2",
        "--trainer.groups_per_batch=1",
        "--trainer.until=1000",
        "--eval.every=1",
        "--eval.tasks=8",
    ]
    model = f"--model.path={TINY_BASE}"
    assert "env.py:Words" in typed("tidegate", "doctor", model, cwd=project, timeout_s=300)
    command = [
        "tidegate",
        "sft",
        "config.toml",
        model,
        "--then",
        "train",
        "--trainer.dynamic_sampling=false",
        *small,
    ]
    typed(*command, cwd=project, timeout_s=600)
    assert (project / "runs/mine-sft/model").is_dir()
    rows = [json.loads(line) for line in (project / "runs/mine/metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 2

"""Runs with two trainer ranks or with weight broadcast: they train, and all processes end together."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.e2e.runs import ENVIRONMENT, TrainProcess, gone, held, metrics, training
from tidegate.errors import TrainingError
from tidegate.failpoints import VARIABLE
from tidegate.trainer.checkpoint import checkpoint as checkpoints

pytestmark = pytest.mark.slow
TWO = "--trainer.ranks=2"
SENT = "--trainer.publish_transport=broadcast"
ADAPTED = ("--trainer.lora.rank=4", "--trainer.activation_checkpointing=true", "--trainer.learning_rate=3e-3")


def other_rank(run: TrainProcess) -> int:
    """The pid of the trainer's rank 1, which may start late."""

    def ranks() -> list[int]:
        children = Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text().split()
        return [pid for pid in map(int, children) if is_rank(pid)]

    def is_rank(pid: int) -> bool:
        return b"distributed.rank_main" in Path(f"/proc/{pid}/cmdline").read_bytes()

    run.until(lambda: len(ranks()) == 1)
    return ranks()[0]


def test_two_ranks_train_through_a_kill_and_the_run_resumes_with_one(tmp_path: Path) -> None:
    """The kill comes when all files of the second checkpoint are written, and before its marker is."""
    run_dir = tmp_path / "two"
    two = ["--trainer.steps=3", "--trainer.checkpoint_every=1", TWO, SENT]
    with training(run_dir, *two, environment={**ENVIRONMENT, VARIABLE: "checkpoint.marker.before:2"}) as run:
        assert run.wait() == -signal.SIGKILL, run.output()
    newest = checkpoints.latest(run_dir)
    assert newest is not None
    assert newest.step == 1
    newest.verify()
    assert (run_dir / "checkpoints" / "step_2" / "optimizer" / ".metadata").exists()
    held(run_dir)
    with training(run_dir, *two, "--resume") as run:
        other = other_rank(run)
        assert run.wait() == 0, run.output()
        assert gone(other)
        assert "could not be sent" not in run.output()
    lines = metrics(run_dir)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert all(line["optimizer_steps"] == 1 for line in lines[1:])
    assert max(line["logprob_max_error"] or 0 for line in lines[1:]) < 1e-3
    assert held(run_dir).groups["trained"] == 12
    with training(run_dir, "--trainer.steps=4", "--resume") as run:
        assert run.wait() == 0, run.output()
    assert held(run_dir).groups["trained"] == 16
    assert max(line["logprob_max_error"] or 0 for line in metrics(run_dir)[1:]) < 1e-3


def test_a_dead_rank_ends_the_run_and_a_dead_run_its_ranks(tmp_path: Path) -> None:
    run_dir = tmp_path / "two"
    with training(run_dir, "--trainer.steps=1000", "--trainer.checkpoint_every=1", TWO, *ADAPTED) as run:
        run.until_step(2)
        os.kill(other_rank(run), signal.SIGKILL)
        assert run.wait(60) == TrainingError.exit_code, run.output()
        said = " ".join(run.output().split())
        assert "trainer rank 1 was killed by SIGKILL" in said
        assert "--resume" in said
    steps = held(run_dir).steps
    with training(run_dir, "--trainer.steps=1000", "--resume", TWO, *ADAPTED) as run:
        run.until_step(steps + 1)
        other = other_rank(run)
        run.kill()
        assert gone(other)
    held(run_dir)


def test_weights_are_sent_through_the_death_of_an_engine_and_on_policy_is_synchronous(tmp_path: Path) -> None:
    run_dir = tmp_path / "sent"
    synchronous = ["--trainer.on_policy=true", "--trainer.max_staleness=0"]
    with training(run_dir, "--trainer.steps=6", "--engine.count=2", *synchronous, SENT) as run:
        run.until_step(2)
        os.kill(run.owned("engine-1"), signal.SIGKILL)
        assert run.wait() == 0, run.output()
        said = " ".join(run.output().split())
    assert "the engine-1 was killed by SIGKILL; starting it again" in said
    lines = metrics(run_dir)
    assert max(line["logprob_max_error"] or 0 for line in lines[1:]) < 1e-3, "sent as trained"
    assert max(line["staleness/max"] for line in lines[1:]) == 0
    assert max(line["weight_version/mixed_turn_ratio"] for line in lines[1:]) == 0
    assert max(line["lag_kl"] for line in lines[1:]) < 1e-6
    assert all(line["time/publish"] > 0 for line in lines[1:])
    audit = held(run_dir)
    assert (audit.groups["trained"], audit.oldest_staleness) == (24, 0)

"""Replays of runs that were resumed, or whose minibatches stream, are identical bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.runs import held, metrics, training
from tidegate.cli import main

pytestmark = pytest.mark.slow


LORA = (
    "--trainer.lora.rank=8", "--trainer.learning_rate=3e-3", "--trainer.compute_dtype=bfloat16",
    "--trainer.activation_checkpointing=true",
)  # fmt: skip


@pytest.mark.parametrize(
    "more", [(), LORA, (*LORA, "--trainer.lora.publish=adapter")], ids=["whole", "lora", "adapter"]
)
def test_steps_after_a_resume_are_replayed_at_the_version_they_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    run_dir = tmp_path / "run"
    with training(run_dir, "--trainer.steps=2", *more) as run:
        assert run.wait() == 0, run.output()[-3000:]
    with training(run_dir, "--trainer.steps=4", "--resume", *more) as run:
        assert run.wait() == 0, run.output()[-3000:]
    held(run_dir)
    # A pass in bfloat16 differs by up to 5e-4, the weights of another version by 3e-3 or more.
    own = [line["logprob_drift"] for line in metrics(run_dir)[1:] if line["staleness/max"] == 0]
    assert max(own) < 1e-3
    assert main(["replay", str(run_dir), "--from", "2", "--json"]) == 0
    steps = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["step"], one["same_weights"]) for one in steps] == [(3, None), (4, True)]
    assert steps[0]["before"]["mismatch_kl"] is not None, "it has tokens of the version that it went on as"


def test_a_run_whose_minibatches_stream_is_taken_again_bit_for_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    with training(run_dir, "--trainer.steps=3", "--trainer.minibatches=2", "--trainer.streaming=true") as run:
        assert run.wait() == 0, run.output()[-3000:]
    assert held(run_dir).groups["trained"] == 3 * 4
    assert main(["replay", str(run_dir), "--json"]) == 0
    steps = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["same"] for one in steps] == [True, True, True]

"""Demo runs with engines from other environments; the checks are the same for each kind of engine."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from tests.e2e.runs import REPO, gone, held, metrics, training

DUO = REPO / "examples" / "duo" / "config.toml"


def through(kind: str, python: str, arguments: Sequence[str]) -> list[str]:
    """Settings of a run that starts its engine from the given environment."""
    words = ", ".join(f'"{word}"' for word in arguments)
    return [f"--engine.kind={kind}", f"--engine.python={python}", f"--engine.arguments=[{words}]"]


def demo_learns_though_its_engine_is_killed(run_dir: Path, settings: list[str]) -> None:
    """Runs fewer steps of the demo with its batches and learning rate, with publishes during requests."""
    demo = [
        "--trainer.steps=36", "--trainer.groups_per_batch=16", "--trainer.group_size=8",
        "--agent.max_concurrency=128", "--eval.tasks=128", "--eval.every=0", "--trainer.checkpoint_every=20",
    ]  # fmt: skip
    with training(run_dir, *settings, *demo) as run:
        run.until_step(3, timeout=300)
        first = run.owned("engine")
        os.kill(first, signal.SIGKILL)
        run.until_said("the engine is back at version", timeout=180)
        assert run.owned("engine") != first
        assert run.wait(timeout=1200) == 0, run.output()[-3000:]
    lines = metrics(run_dir)
    assert lines[-1]["eval/reward"] >= 0.85
    errors = [line["logprob_max_error"] for line in lines[1:]]
    # Null: the batch has no token of its version. Their number depends on the machine's other work.
    assert max(error for error in errors if error is not None) < 1e-3
    assert any(line["weight_version/mixed_turn_ratio"] > 0 for line in lines[1:])
    audit = held(run_dir)
    assert audit.oldest_staleness is not None
    assert audit.oldest_staleness <= 2
    assert gone(run.owned("engine"))


def engine_ends_with_a_killed_run_which_goes_on(run_dir: Path, settings: list[str]) -> None:
    with training(run_dir, *settings, "--trainer.steps=1000") as run:
        run.until_step(3, timeout=300)
        server = run.owned("engine")
        run.kill()
        assert gone(server)
    with training(run_dir, *settings, "--trainer.steps=6", "--resume") as run:
        assert run.wait(timeout=300) == 0, run.output()[-3000:]
    assert [line["step"] for line in metrics(run_dir)] == [0, 1, 2, 3, 4, 5, 6]
    held(run_dir)


def adapters_of_two_policies_continue_after_a_kill(
    run_dir: Path, settings: Sequence[str], tolerance: float
) -> None:
    """Each turn was sampled from the adapter of its policy: else its logprobs were those of the other one."""
    adapters = [*settings, "--trainer.lora.rank=4", "--trainer.lora.publish=adapter"]
    with training(run_dir, "--trainer.steps=9", *adapters, config=DUO) as run:
        run.until_step(2, timeout=600)
        run.kill()
    with training(run_dir, "--resume", "--trainer.steps=4", *adapters, config=DUO) as run:
        assert run.wait(timeout=1200) == 0, run.output()[-3000:]
    held(run_dir)
    assert [path.name for path in (run_dir / "logs").glob("engine*.log")] == ["engine-solver.log"]
    for name in ("solver", "verifier"):  # known of tokens of the trainer's own version only
        key = f"policy/{name}/logprob_max_error"
        errors = [line[key] for line in metrics(run_dir) if line.get(key) is not None]
        assert errors
        assert max(errors) < tolerance

"""Measures what fine-tuning on the base model's own best episodes adds to the demo's held-out reward.

A run with learning rate 0 samples the demo's base model through the gateway, and its episodes are exported as
a table. `tidegate sft` then trains the base model on the best episode of each group, with a reward of 1, and
evaluates it before and after. All other settings are those of the demo.

    python benchmarks/sft.py [--json] [--seeds 1] [--steps 10] [--epochs 4] [--learning-rate 1e-3]
                             [--keep DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import Check, report
from controls import EXAMPLES

from tidegate.cli import main as tidegate
from tidegate.config import load_settings
from tidegate.envs.base import load_environment
from tidegate.trainer.ledger.audit import audit_run
from tidegate.trainer.records.metrics import read_metrics
from tidegate.trainer.run import Run
from tidegate.viewer.live import make_view

DEMO = EXAMPLES / "demo" / "config.toml"


def sample(directory: Path, seed: int, steps: int) -> Path:
    """Samples groups of the demo's tasks with the base model; returns the run's directory."""
    overrides = [
        f"--run.dir={directory}", f"--run.name=sampled-{seed}", f"--run.seed={seed}",
        f"--trainer.steps={steps}", "--trainer.learning_rate=0", "--trainer.schedule=constant",
        "--trainer.publish_interval=never", "--eval.every=0", "--eval.tasks=1",
    ]  # fmt: skip
    settings = load_settings(DEMO, overrides)
    environment = load_environment(settings.env.use, settings.env.options)
    view = make_view(False, settings.trainer.steps, settings.trainer.staleness_bound)
    asyncio.run(Run(settings, environment, view).train())
    return settings.run_dir


def measure(directory: Path, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Samples, exports and fine-tunes; returns the held-out rewards before and after."""
    began = time.monotonic()
    run_dir, table = sample(directory, seed, arguments.steps), directory / f"sampled-{seed}.parquet"
    sampled_s = time.monotonic() - began
    assert tidegate(["export", str(run_dir), "--parquet", "--out", str(table)]) == 0
    code = tidegate(
        [
            "sft", str(DEMO), f"--run.dir={directory}", f"--run.name=seed-{seed}", f"--run.seed={seed}",
            f"--sft.episodes={table}", "--sft.per_group=1", "--sft.validation=0.1", "--sft.held_out=true",
            f"--sft.epochs={arguments.epochs}", f"--sft.learning_rate={arguments.learning_rate}",
            "--eval.every=5",
        ]
    )  # fmt: skip
    assert code == 0
    lines = read_metrics(directory / f"seed-{seed}-sft")
    held = [line for line in lines if "eval/reward" in line]
    losses = [line["validation/loss"] for line in lines if "validation/loss" in line]
    return {
        "seed": seed,
        "before": held[0]["eval/reward"],
        "after": held[-1]["eval/reward"],
        "unseen_templates": held[-1]["eval/reward_unseen_templates"],
        "steps": lines[-1]["step"],
        "trained_tokens": sum(line.get("tokens/trained", 0) for line in lines),
        "validation_loss_before": losses[0],
        "validation_loss_after": losses[-1],
        "sampling_seconds": round(sampled_s, 1),
        "training_seconds": round(sum(line.get("time/step", 0.0) for line in lines), 1),
        "audit": audit_run(run_dir).consistent,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a JSON object last")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10, help="batches of 16 groups that are sampled")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--keep", type=Path, help="directory in which to keep the runs")
    arguments = parser.parse_args()
    directory = arguments.keep or Path(tempfile.mkdtemp(prefix="tidegate-sft-"))
    try:
        results = [measure(directory, seed, arguments) for seed in range(arguments.seeds)]
    finally:
        if arguments.keep is None:
            shutil.rmtree(directory, ignore_errors=True)
    checks = [
        Check("before", max(result["before"] for result in results), "<=", 0.45),
        Check("after", min(result["after"] for result in results), ">=", 0.6),
        Check("audits_hold", float(all(result["audit"] for result in results)), "==", 1.0),
    ]
    return report(results, checks, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())

"""Compares the sampled tokens that a student needs to a held-out reward, by a teacher and by rewards.

The student is the demo's base model. The run `rewards` is the demo's RL, and ends at the target. The run
`teacher` learns from the teacher alone (`trainer.teacher.reward_weight = 0`), with one episode per task, 64
of them per batch, and a learning rate of 5e-4 that falls in 24 steps: a signal for each token allows larger
steps than the demo's rewards. All other settings are the demo's. Tokens are those of all training episodes
that have ended (`tokens/sampled_total`); the tokens to the target are read from the held-out rewards of the
evaluations, by isotonic regression.

    python benchmarks/distill.py [--json] [--teacher MODEL] [--rewards RUN] [--seed 0] [--groups 64]
                                 [--learning-rate 5e-4] [--steps 24] [--form distribution] [--keep DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from async_vs_sync import reaches
from common import Check, report
from controls import CONFIGS, EXAMPLES

from tidegate.config import load_settings
from tidegate.envs.base import load_environment
from tidegate.trainer.ledger.audit import audit_run
from tidegate.trainer.records.metrics import read_metrics
from tidegate.trainer.run import Run
from tidegate.viewer.live import make_view

TEACHER = EXAMPLES / "tiny_teacher" / "model"
EVERY = 4
"""Steps between evaluations, which are the points of the curve."""
TASKS = 128
"""Held-out tasks of each evaluation."""


def train(directory: Path, name: str, overrides: Sequence[str]) -> Path:
    """Trains; returns the run's directory."""
    evaluated = [f"--eval.every={EVERY}", f"--eval.interim_tasks={TASKS}"]
    settings = load_settings(
        EXAMPLES / CONFIGS["calculator"],
        [f"--run.dir={directory}", f"--run.name={name}", *evaluated, *overrides],
    )
    view = make_view(False, settings.trainer.steps, settings.trainer.staleness_bound)
    environment = load_environment(settings.env.use, settings.env.options)
    asyncio.run(Run(settings, environment, view).train())
    return settings.run_dir


def measured(run: Path, target: float) -> dict[str, Any]:
    """Returns the tokens to the target, and the held-out rewards."""
    lines = read_metrics(run)
    points = [line for line in lines if "eval/reward" in line]
    rewards = [line["eval/reward"] for line in points]
    return {
        "run": run.name,
        "before": rewards[0],
        "best": max(rewards),
        "tokens_to_target": reaches([line["tokens/sampled_total"] for line in points], rewards, target),
        "steps_to_target": reaches([float(line["step"]) for line in points], rewards, target),
        "tokens": lines[-1]["tokens/sampled_total"],
        "steps": lines[-1]["step"],
        "rewards": {line["step"]: round(line["eval/reward"], 3) for line in points},
        "kl": {line["step"]: round(line["teacher/kl"], 4) for line in lines if "teacher/kl" in line},
        "teacher_s": round(sum(line.get("time/teacher", 0.0) for line in lines), 1),
        "audit": audit_run(run).consistent,
        "seconds": round(lines[-1]["time"] - lines[0]["time"], 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a JSON object last")
    parser.add_argument("--teacher", type=Path, default=TEACHER, help="directory of the teacher's model")
    parser.add_argument(
        "--form", choices=("advantage", "loss", "distribution"), default="distribution",
        help="trainer.teacher.form",
    )  # fmt: skip
    parser.add_argument(
        "--rewards", type=Path, help="run of an earlier call (--keep), in place of the RL run"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--groups", type=int, default=64, help="episodes of a batch of the run `teacher`")
    parser.add_argument("--learning-rate", type=float, default=5e-4, help="of the run `teacher`")
    parser.add_argument("--steps", type=int, default=24, help="steps of the run `teacher`")
    parser.add_argument("--target", type=float, default=0.9, help="sampled held-out reward to reach")
    parser.add_argument("--keep", type=Path, help="directory in which to keep the runs")
    arguments = parser.parse_args()
    directory = arguments.keep or Path(tempfile.mkdtemp(prefix="tidegate-distill-"))
    target, seed = arguments.target, f"--run.seed={arguments.seed}"
    until = f"--trainer.until={target}"
    try:
        rewards = measured(arguments.rewards or train(directory, "rewards", [seed, until]), target)
        distilled_run = train(
            directory, "teacher",
            [
                seed, until, f"--trainer.teacher.path={arguments.teacher}",
                f"--trainer.teacher.form={arguments.form}", "--trainer.teacher.reward_weight=0",
                "--trainer.group_size=1", f"--trainer.groups_per_batch={arguments.groups}",
                f"--trainer.steps={arguments.steps}", f"--trainer.learning_rate={arguments.learning_rate}",
            ],
        )  # fmt: skip
        distilled = measured(distilled_run, target)
    finally:
        if arguments.keep is None:
            shutil.rmtree(directory, ignore_errors=True)
    tokens = [run["tokens_to_target"] for run in (distilled, rewards)]
    ratio = tokens[0] / tokens[1] if all(tokens) else None
    checks = [
        Check("student_before", distilled["before"], "<=", 0.5),
        Check("student_after", distilled["best"], ">=", target),
        Check("tokens_vs_rl", ratio, "<=", 0.5),
        Check("audits_hold", float(rewards["audit"] and distilled["audit"]), "==", 1.0),
    ]
    return report([rewards, distilled], checks, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())

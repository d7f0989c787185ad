"""Compares what the demo needs to reach a held-out reward: sampled tokens, and CPU seconds of all processes.

Each seed has two runs of `tidegate train examples/demo/config.toml`: one with the demo's earlier loss, batch,
learning rate and number of steps, and one with those of today. `--before` runs the earlier arm in a checkout
of an earlier commit, which has a `.venv` of its own. A run ends at the first evaluation that reaches the
target; both arms evaluate after every 64 trained groups, the CPU seconds include it. Isotonic regression
over the evaluations gives the tokens to the target; both figures are summed over the seeds.

    python benchmarks/defaults.py [--json] [--seeds 3] [--target 0.9] [--before CHECKOUT] [--keep DIR]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from async_vs_sync import reaches
from common import Check, report

from tidegate.trainer.ledger.audit import audit_run
from tidegate.trainer.records.metrics import read_metrics

ROOT = Path(__file__).parents[1]
EARLIER = [
    "--trainer.loss.name=truncated_is", "--trainer.groups_per_batch=16", "--trainer.steps=40",
    "--trainer.learning_rate=5e-4", "--eval.every=4",
]  # fmt: skip
TODAY = ["--eval.every=16"]


def measure(checkout: Path, run_dir: Path, seed: int, target: float, overrides: list[str]) -> dict[str, Any]:
    """Trains the demo in a checkout; returns its tokens and CPU seconds to the target."""
    python = sys.executable if checkout == ROOT else str(checkout / ".venv" / "bin" / "python")
    command = [
        python, "-m", "tidegate", "train", "examples/demo/config.toml", f"--run.dir={run_dir.parent}",
        f"--run.name={run_dir.name}", f"--run.seed={seed}", "--run.live_view=false",
        f"--trainer.until={target}", "--eval.interim_tasks=128", *overrides,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(command, cwd=checkout, env=environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(run.pid, 0)  # with the processes that the run has started and waited for
    run.returncode = os.waitstatus_to_exitcode(status)
    if run.returncode:
        raise SystemExit(f"{' '.join(command)} ended with status {run.returncode}")
    lines = read_metrics(run_dir)
    points = [line for line in lines if "eval/reward" in line]
    tokens = [line["tokens/sampled_total"] for line in points]
    return {
        "run": run_dir.name,
        "tokens_to_target": reaches(tokens, [line["eval/reward"] for line in points], target),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "rewards": {line["step"]: round(line["eval/reward"], 3) for line in points},
        "audit": audit_run(run_dir).consistent,
    }


def ratio(results: dict[str, list[dict[str, Any]]], figure: str) -> float | None:
    """Today's figure ÷ the earlier one, each summed over the seeds; None if a run missed the target."""
    if any(result["tokens_to_target"] is None for arm in results.values() for result in arm):
        return None
    return sum(one[figure] for one in results["today"]) / sum(one[figure] for one in results["earlier"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a JSON object last")
    parser.add_argument("--seeds", type=int, default=3, help="number of pairs of runs")
    parser.add_argument("--target", type=float, default=0.9, help="sampled held-out reward to reach")
    parser.add_argument("--before", type=Path, default=ROOT, help="checkout that runs the earlier arm")
    parser.add_argument("--keep", type=Path, help="directory in which to keep the runs")
    arguments = parser.parse_args()
    directory = arguments.keep or Path(tempfile.mkdtemp(prefix="tidegate-defaults-"))
    arms = {"earlier": (arguments.before.resolve(), EARLIER), "today": (ROOT, TODAY)}
    results: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    try:
        for seed in range(arguments.seeds):
            for arm, (checkout, overrides) in arms.items():
                run_dir = directory.resolve() / f"{arm}-seed{seed}"
                results[arm].append(measure(checkout, run_dir, seed, arguments.target, overrides))
    finally:
        if arguments.keep is None:
            shutil.rmtree(directory, ignore_errors=True)
    every = [one for arm in results.values() for one in arm]
    checks = [
        Check("tokens_vs_earlier", ratio(results, "tokens_to_target"), "<=", 0.9),
        Check("cpu_vs_earlier", ratio(results, "cpu_seconds"), "<=", 0.6),
        Check("audits_hold", float(all(one["audit"] for one in every)), "==", 1.0),
    ]
    return report(every, checks, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())

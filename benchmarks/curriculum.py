"""Compares the sampled tokens that a run needs to a held-out reward, by the choice of its training tasks.

Each pair of runs trains the same model with the same seed, with `trainer.curriculum.name` = uniform and
difficulty, on one of three sets of tasks: `finite`, 500 problems of the demo, with an eighth of its learning
rate and four times its groups per batch, so that a run takes several epochs; `search`, the finite set of the
search demo; `endless`, the demo's problems, which are known by their templates only. All other settings are
those of the demos. Tokens are those of all training episodes that have ended (`tokens/sampled_total`).
Isotonic regression makes the held-out reward, measured every fourth step, monotone in tokens; the tokens to
the target are read from that curve, and summed over the seeds. A run ends at the first evaluation that is
0.03 above the target.

    python benchmarks/curriculum.py [--json] [--only finite search endless] [--seeds 3] [--learning-rate 1e-4]
                                    [--keep DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from async_vs_sync import reaches
from common import Check, report
from controls import demo

from tidegate.config import Settings, load_settings
from tidegate.envs.base import load_environment
from tidegate.trainer.ledger.audit import audit_run
from tidegate.trainer.records.metrics import read_metrics
from tidegate.trainer.run import Run
from tidegate.viewer.live import make_view

ABOVE = 0.03
"""How far above the target an evaluation ends a run."""
EVERY = 4
"""Steps between evaluations, which are the points of the curve."""
ARMS = ("uniform", "difficulty")
DEMOS = {"finite": "calculator", "search": "search", "endless": "calculator"}
FINITE = [
    f"--env.use={Path(__file__).parent}/arithmetic_500.py:Arithmetic500",
    "--trainer.groups_per_batch=16", "--trainer.steps=240", "--trainer.learning_rate=5e-5",
]  # fmt: skip
GOALS = {
    "finite": ("tokens_vs_uniform_finite", 0.7),
    "search": ("tokens_vs_uniform_search", 0.85),
    "endless": ("tokens_vs_uniform", 0.95),
}


def measure(settings: Settings, tasks: str, target: float) -> dict[str, Any]:
    """Trains; returns the tokens to the target, and what became of the groups by then."""
    began = time.monotonic()
    view = make_view(False, settings.trainer.steps, settings.trainer.staleness_bound)
    environment = load_environment(settings.env.use, settings.env.options)
    asyncio.run(Run(settings, environment, view).train())
    lines = read_metrics(settings.run_dir)
    points = [line for line in lines if "eval/reward" in line]
    rewards = [line["eval/reward"] for line in points]
    tokens = reaches([line["tokens/sampled_total"] for line in points], rewards, target)
    until = [line for line in lines if tokens is not None and line["tokens/sampled_total"] <= tokens]
    return {
        "run": settings.run.name,
        "tasks": tasks,
        "arm": settings.trainer.curriculum.name,
        "tokens_to_target": tokens,
        "steps_to_target": reaches([float(line["step"]) for line in points], rewards, target),
        **_shares((until or lines)[-1]),
        "skipped": int(lines[-1].get("curriculum/skipped", 0)),
        "rewards": {line["step"]: round(line["eval/reward"], 3) for line in points},
        "audit": audit_run(settings.run_dir).consistent,
        "seconds": round(time.monotonic() - began, 1),
    }


def _shares(line: dict[str, Any]) -> dict[str, float]:
    """Shares of filtered groups among those that were filtered or trained on, by cause."""
    ended = line["groups/filtered"] + line["groups/stepped"] + line["groups/trained"]
    causes = ("filtered", "filtered_solved", "filtered_failed")
    return {f"{cause}_share": line[f"groups/{cause}"] / max(1.0, ended) for cause in causes}


def ratio(results: Sequence[dict[str, Any]], tasks: str) -> float | None:
    """Tokens with `difficulty` ÷ tokens with `uniform`, each summed over the seeds."""
    sums = dict.fromkeys(ARMS, 0.0)
    for result in results:
        if result["tasks"] == tasks:
            if result["tokens_to_target"] is None:
                return None
            sums[result["arm"]] += result["tokens_to_target"]
    return sums["difficulty"] / sums["uniform"]


def runs(
    directory: Path, tasks: str, seeds: int, changed: Sequence[str], target: float
) -> list[dict[str, Any]]:
    """The pairs of runs on one set of tasks, with settings that are changed in all of them."""
    results = []
    with demo(DEMOS[tasks], directory) as (config, laid):
        for seed in range(seeds):
            for arm in ARMS:
                overrides = [
                    f"--run.dir={directory}", f"--run.name={tasks}-{arm}-seed{seed}", f"--run.seed={seed}",
                    f"--trainer.curriculum.name={arm}", f"--eval.every={EVERY}", "--eval.interim_tasks=128",
                    f"--trainer.until={target + ABOVE}",
                    *(FINITE if tasks == "finite" else []), *laid, *changed,
                ]  # fmt: skip
                results.append(measure(load_settings(config, overrides), tasks, target))
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a JSON object last")
    parser.add_argument("--only", nargs="+", choices=DEMOS, default=list(DEMOS), help="sets of tasks")
    parser.add_argument("--seeds", type=int, default=3, help="number of pairs of runs on each set of tasks")
    parser.add_argument("--steps", type=int, help="steps per run")
    parser.add_argument("--learning-rate", type=float, help="learning rate of all runs")
    parser.add_argument("--target", type=float, default=0.9, help="sampled held-out reward to reach")
    parser.add_argument("--keep", type=Path, help="directory in which to keep the runs")
    arguments = parser.parse_args()
    directory = arguments.keep or Path(tempfile.mkdtemp(prefix="tidegate-curriculum-"))
    changed = [
        f"--trainer.{name}={value}"
        for name, value in (("steps", arguments.steps), ("learning_rate", arguments.learning_rate))
        if value is not None
    ]
    results: list[dict[str, Any]] = []
    try:
        for tasks in arguments.only:
            results += runs(directory, tasks, arguments.seeds, changed, arguments.target)
    finally:
        if arguments.keep is None:
            shutil.rmtree(directory, ignore_errors=True)
    checks = [
        *(Check(GOALS[tasks][0], ratio(results, tasks), "<=", GOALS[tasks][1]) for tasks in arguments.only),
        Check("audits_hold", float(all(result["audit"] for result in results)), "==", 1.0),
    ]
    return report(results, checks, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())

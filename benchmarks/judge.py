"""Trains the demo with the reward of a judge alone; the held-out reward is that of the verifier.

The judge is a scripted, OpenAI-compatible server on loopback that knows the answers. In the arm `noisy` a
tenth of its grades are wrong; in `failing` half of its calls fail; in `ranking` it compares the attempts of a
group in one call, with a tenth of the grades wrong. All other settings are the demo's. Of each arm the files
of the run are checked: no episode or group without a verdict was trained on.

    python benchmarks/judge.py [--json] [--only noisy failing ranking] [--steps 40] [--keep DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import Check, report
from scripted_judge import ScriptedJudge, served

from tidegate.config import Settings, load_settings
from tidegate.envs.base import load_environment
from tidegate.trainer.ledger.audit import audit_run
from tidegate.trainer.records.metrics import read_metrics
from tidegate.trainer.run import Run
from tidegate.viewer.live import make_view

CONFIG = Path(__file__).parents[1] / "examples" / "demo" / "config.toml"
GOAL = 0.85
ARMS: dict[str, tuple[dict[str, float], str]] = {
    "noisy": ({"noise": 0.1}, "score"),
    "failing": ({"failing": 0.5}, "score"),
    "ranking": ({"noise": 0.1}, "ranking"),
}
"""Arm → arguments of its judge, and what the judge is asked."""


def measure(arm: str, directory: Path, overrides: list[str]) -> dict[str, Any]:
    """Trains one arm; returns the held-out reward and what the run's files show of the judge."""
    arguments, kind = ARMS[arm]
    judge = ScriptedJudge(**arguments)
    with served(judge) as url:
        settings = load_settings(
            CONFIG,
            [
                f"--run.dir={directory}", f"--run.name={arm}", f"--env.judge.url={url}",
                "--env.judge.model=scripted", f"--env.judge.kind={kind}",
                "--env.judge.rubric=The final number is the right answer to the problem.",
                "--env.judge.environment_weight=0", *overrides,
            ],
        )  # fmt: skip
        began = time.monotonic()
        view = make_view(False, settings.trainer.steps, settings.trainer.staleness_bound)
        environment = load_environment(settings.env.use, settings.env.options)
        result = asyncio.run(Run(settings, environment, view).train())
    lines = [line for line in read_metrics(settings.run_dir) if "judge/calls" in line]
    return {
        "arm": arm,
        "before": result.initial_eval["eval/reward"],
        "after": result.final_eval["eval/reward"],
        "agreement": next(
            (line["judge/agreement"] for line in reversed(lines) if "judge/agreement" in line), None
        ),
        **{name: sum(line[f"judge/{name}"] for line in lines) for name in ("calls", "cached", "errors")},
        "served": judge.calls,
        "failed": judge.failures,
        **_failures(settings, arm),
        "audit": audit_run(settings.run_dir).consistent,
        "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip


def _failures(settings: Settings, arm: str) -> dict[str, int]:
    """Returns how many episodes ended without a verdict, and how many of those were trained on.

    Where the judge makes no mistakes, a trained reward that differs from the verifier's is a failure, too.
    """
    ends = {}
    for line in _lines(settings.run_dir / "ledger.jsonl"):
        if line["kind"] == "attempt" and line["event"] == "ended":
            ends[line["id"]] = line
    failed = {name for name, line in ends.items() if line["outcome"] in ("reward_error", "infra_error")}
    trained = 0
    for path in (settings.run_dir / "trajectories").glob("step_*.jsonl"):
        for line in _lines(path):
            if line["state"] == "stepped":
                wrong = arm == "failing" and line["reward"] != line["metrics"]["judge/environment"]
                unjudged = "judge" not in line["reward_parts"] or line["metadata"]["attempt"] in failed
                trained += wrong or unjudged
    return {"without_verdict": len(failed), "trained_on_failure": trained}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open() as file:
        yield from map(json.loads, file)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a JSON object last")
    parser.add_argument("--only", nargs="+", choices=ARMS, default=list(ARMS), help="arms")
    parser.add_argument("--steps", type=int, help="steps per run (the demo's)")
    parser.add_argument("--keep", type=Path, help="directory in which to keep the runs")
    arguments = parser.parse_args()
    directory = arguments.keep or Path(tempfile.mkdtemp(prefix="tidegate-judge-"))
    overrides = [] if arguments.steps is None else [f"--trainer.steps={arguments.steps}"]
    try:
        results = [measure(arm, directory, overrides) for arm in arguments.only]
    finally:
        if arguments.keep is None:
            shutil.rmtree(directory, ignore_errors=True)
    checks = [Check(f"held_out_{result['arm']}", result["after"], ">=", GOAL) for result in results]
    failures = sum(result["trained_on_failure"] for result in results)
    checks.append(Check("trained_on_failure", float(failures), "==", 0.0))
    if "failing" in arguments.only:
        seen = next(result["without_verdict"] for result in results if result["arm"] == "failing")
        checks.append(Check("without_verdict_failing", float(seen), ">=", 1.0))
    checks.append(Check("audits_hold", float(all(result["audit"] for result in results)), "==", 1.0))
    return report(results, checks, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())

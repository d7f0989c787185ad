"""Compares the sampled tokens that the demo needs to a held-out reward, by default loss.

For each seed the demo runs with `trainer.loss.name` = truncated_is, which was the default before, and with
the default of today. A run ends at the target. Isotonic regression over its evaluations, every fourth step,
gives the tokens to the target; they are summed over the seeds (curriculum.py).

    python benchmarks/defaults.py [--json] [--seeds 3] [--target 0.9] [--keep DIR]
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from common import Check, report
from controls import CONFIGS, EXAMPLES
from curriculum import EVERY, measure

from tidegate.config import TrainerSettings, load_settings

ARMS = {"earlier": "truncated_is", "default": TrainerSettings().loss.name}
"""Arm → loss."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a JSON object last")
    parser.add_argument("--seeds", type=int, default=3, help="number of pairs of runs")
    parser.add_argument("--target", type=float, default=0.9, help="sampled held-out reward to reach")
    parser.add_argument("--keep", type=Path, help="directory in which to keep the runs")
    arguments = parser.parse_args()
    directory = arguments.keep or Path(tempfile.mkdtemp(prefix="tidegate-defaults-"))
    results = []
    try:
        for seed in range(arguments.seeds):
            for arm, loss in ARMS.items():
                overrides = [
                    f"--run.dir={directory}", f"--run.name={arm}-seed{seed}", f"--run.seed={seed}",
                    f"--trainer.loss.name={loss}", f"--trainer.until={arguments.target}",
                    f"--eval.every={EVERY}", "--eval.interim_tasks=128",
                ]  # fmt: skip
                settings = load_settings(EXAMPLES / CONFIGS["calculator"], overrides)
                results.append({**measure(settings, "endless", arguments.target), "arm": arm})
    finally:
        if arguments.keep is None:
            shutil.rmtree(directory, ignore_errors=True)
    tokens = {arm: [one["tokens_to_target"] for one in results if one["arm"] == arm] for arm in ARMS}
    reached = all(one is not None for arm in tokens.values() for one in arm)
    ratio = sum(tokens["default"]) / sum(tokens["earlier"]) if reached else None
    checks = [
        Check("tokens_vs_earlier_default", ratio, "<=", 0.9),
        Check("audits_hold", float(all(one["audit"] for one in results)), "==", 1.0),
    ]
    return report(results, checks, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())

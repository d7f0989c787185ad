"""Replays the steps of a demo run from its files and compares every loss and parameter bit by bit.

A second replay with another learning rate checks that differences are detected.

    python benchmarks/replay.py [--json] [--steps 40] [--run RUN]
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

from common import Check, report

from tidegate.config import load_settings
from tidegate.envs.base import load_environment
from tidegate.trainer.replay import Replay
from tidegate.trainer.run import Run
from tidegate.viewer.live import make_view

DEMO = Path(__file__).parents[1] / "examples" / "demo" / "config.toml"


def train(directory: Path, steps: int) -> Path:
    settings = load_settings(DEMO, [f"--run.dir={directory}", f"--trainer.steps={steps}", "--eval.every=0"])
    view = make_view(False, settings.trainer.steps, settings.trainer.staleness_bound)
    environment = load_environment(settings.env.use, settings.env.options)
    asyncio.run(Run(settings, environment, view).train())
    return settings.run_dir


def replayed(run_dir: Path, *overrides: str) -> dict[str, Any]:
    began = time.monotonic()
    replay = Replay(run_dir, load_settings(run_dir / "config.toml", overrides))
    steps = list(replay.run(replay.start()))
    return {
        "replay": " ".join(overrides) or "as it was",
        "steps": len(steps),
        "differing": sum(not one.same for one in steps),
        "checkpoints": sum(one.same_weights is not None for one in steps),
        "differing_weights": sum(one.same_weights is False for one in steps),
        "seconds": round(time.monotonic() - began, 1),
    }


def checks_of(same: dict[str, Any], other: dict[str, Any]) -> Sequence[Check]:
    return [
        Check("steps_differing", same["differing"], "==", 0),
        Check("weights_differing", same["differing_weights"], "==", 0),
        Check("checkpoints_compared", same["checkpoints"], ">=", 1),
        Check("steps_differing_at_another_rate", other["differing"], ">=", same["steps"] - 1),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object last")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--run", type=Path, help="directory of an existing run")
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="tidegate-replay-"))
    try:
        run_dir = arguments.run or train(directory, arguments.steps)
        rate = load_settings(run_dir / "config.toml").trainer.learning_rate
        found = [replayed(run_dir), replayed(run_dir, f"--trainer.learning_rate={rate * 1.01}")]
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return report(found, checks_of(*found), as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())

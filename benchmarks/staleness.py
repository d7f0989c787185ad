"""Held-out reward of the demo after equal tokens, by staleness bound and loss.

Each cell is a run that ends once it has trained on the budget, `--steps` × 3,000 tokens (a step of the demo
has about so many), and is then evaluated. A cell that was measured with the same budget and seed is not
measured again, so the table can be filled over several days.

    python benchmarks/staleness.py [--json] [--cells 0:truncated 8:gspo] [--steps 40] [--seed 0] [--out DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import Check, report

from tidegate.config import DECOUPLED, LOSSES, load_settings
from tidegate.envs.base import load_environment
from tidegate.observer import Silent
from tidegate.trainer.audit import audit_run
from tidegate.trainer.metrics import read_metrics
from tidegate.trainer.run import Run

HERE = Path(__file__).parent
DEMO = HERE.parent / "examples" / "demo" / "config.toml"
BOUNDS = ("0", "1", "2", "4", "8", "none")
TOKENS_A_STEP = 3000
EVAL_TASKS = 200
FIGURES = ("staleness/mean", "ess", "clip_fraction", "lag_kl")


@dataclass(frozen=True, order=True)
class Cell:
    bound: str
    loss: str

    @classmethod
    def parse(cls, text: str) -> Cell:
        bound, _, loss = text.partition(":")
        if bound not in BOUNDS or loss not in LOSSES:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not BOUND:LOSS; bounds: {', '.join(BOUNDS)}; losses: {', '.join(LOSSES)}"
            )
        return cls(bound, loss)

    @property
    def name(self) -> str:
        return f"{self.bound}-{self.loss}"


class Meter(Silent):
    """Stops a run once it has trained on enough tokens."""

    def __init__(self, budget: float) -> None:
        self.budget = budget
        self.tokens = 0.0
        self.run: Run | None = None

    def step(self, metrics: Mapping[str, float]) -> None:
        self.tokens += metrics.get("tokens/trained", 0.0)
        if self.run is not None and self.tokens >= self.budget:
            self.run.stop.set()


def measure(cell: Cell, steps: int, seed: int) -> dict[str, Any]:
    """Train a cell to its budget, then evaluate its last checkpoint."""
    directory = Path(tempfile.mkdtemp(prefix="tidegate-staleness-"))
    began = time.monotonic()
    try:
        run_dir, tokens = _train(cell, steps, seed, directory)
        lines = [line for line in read_metrics(run_dir) if "loss" in line]
        return {
            "cell": cell.name,
            "steps_asked": steps,
            "seed": seed,
            "reward": _evaluate(run_dir, directory / "eval"),
            "tokens": tokens,
            "steps": len(lines),
            "staleness/max": max(line["staleness/max"] for line in lines),
            **{name: _mean(lines, name) for name in FIGURES},
            "audit": audit_run(run_dir).holds,
            "seconds": round(time.monotonic() - began, 1),
        }
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _train(cell: Cell, steps: int, seed: int, directory: Path) -> tuple[Path, float]:
    settings = load_settings(DEMO, [
        f"--run.dir={directory}", f"--run.name={cell.name}", f"--run.seed={seed}",
        f"--trainer.steps={4 * steps}", f"--trainer.max_staleness={cell.bound}",
        f"--trainer.loss={cell.loss}", f"--trainer.minibatches={2 if cell.loss in DECOUPLED else 1}",
        "--trainer.schedule=constant", "--eval.every=0", "--eval.tasks=1",
    ])  # fmt: skip
    meter = Meter(steps * TOKENS_A_STEP)
    environment = load_environment(settings.env.use, settings.env.options)
    meter.run = Run(settings, environment, meter)
    asyncio.run(meter.run.train())
    if meter.tokens < meter.budget:
        raise RuntimeError(
            f"{cell.name}: {meter.tokens:.0f} of {meter.budget:.0f} tokens in {4 * steps} steps"
        )
    return settings.run_dir, meter.tokens


def _evaluate(run_dir: Path, out: Path) -> float:
    """The mean held-out reward, sampled as in training."""
    command = ["-m", "tidegate", "eval", run_dir, "--json", "--sets", "main", "--tasks", str(EVAL_TASKS)]
    done = subprocess.run(
        [sys.executable, *command, "--out", out], check=True, capture_output=True, timeout=600, text=True
    )
    result = json.loads(done.stdout)
    return float(result["sets"]["main"]["reward"]["mean"])


def _mean(lines: list[dict[str, Any]], name: str) -> float | None:
    known = [float(line[name]) for line in lines if line.get(name) is not None]
    known = [one for one in known if math.isfinite(one)]
    return sum(known) / len(known) if known else None


def measured(path: Path, steps: int, seed: int) -> dict[str, Any] | None:
    """A cell that was measured like this before."""
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    return found if (found["steps_asked"], found["seed"]) == (steps, seed) else None


def keep(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result))
    partial.replace(path)


def table(found: Mapping[Cell, Mapping[str, Any]]) -> str:
    """Held-out reward (mean staleness), a row a loss, in Markdown."""
    lines = ["| loss | " + " | ".join(BOUNDS) + " |", "|---" * (1 + len(BOUNDS)) + "|"]
    for loss in LOSSES:
        row = [found.get(Cell(bound, loss)) for bound in BOUNDS]
        if any(row):
            told = [f"{one['reward']:.3f} ({one['staleness/mean']:.1f})" if one else "" for one in row]
            lines.append(f"| `{loss}` | " + " | ".join(told) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--cells", nargs="+", type=Cell.parse, help="BOUND:LOSS …; else all of them")
    parser.add_argument("--steps", type=int, default=40, help="the budget, in steps of 3,000 tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/staleness"), help="where cells are kept")
    arguments = parser.parse_args()
    cells = arguments.cells or [Cell(*one) for one in itertools.product(BOUNDS, LOSSES)]
    found: dict[Cell, dict[str, Any]] = {}
    for cell in cells:
        path = arguments.out / f"{cell.name}-{arguments.steps}-{arguments.seed}.json"
        result = measured(path, arguments.steps, arguments.seed)
        if result is None:
            result = measure(cell, arguments.steps, arguments.seed)
            keep(path, result)
        found[cell] = result
    print(table(found))
    stale = [one["staleness/max"] - float(cell.bound) for cell, one in found.items() if cell.bound != "none"]
    checks = [
        Check("staleness_over_bound", max(stale, default=0.0), "<=", 0.0),
        Check("audits_hold", float(all(one["audit"] for one in found.values())), "==", 1.0),
    ]
    return report(list(found.values()), checks, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())

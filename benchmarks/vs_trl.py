"""The words demo beside TRL's GRPO: same model, tasks, group size, tokens, rate and steps, on the same cores.

Both start from one model, warmed up as `make demo` does. One after the other they train on four groups of 16
a step, and evaluate on the same held-out tasks at the same steps. Both train for `--steps` steps, after which
their rewards are compared, and on to the first evaluation that reaches 0.9, for twice as many at most. Wall
time and CPU seconds are those of the whole process trees, from the start of the command to that evaluation.

Differences: Tidegate replaces groups whose rewards are all equal, samples the next groups during a step
(staleness of at most 2), and evaluates greedily, too. TRL trains on all groups, and samples and trains in
turn in one process, a step in one batch and without gradient checkpointing: its fastest documented settings
on a CPU.

    python benchmarks/vs_trl.py --trl PYTHON [--json] [--seeds 3] [--steps 24] [--every 6] [--keep DIR]

`PYTHON` is the interpreter of an environment with requirements/trl.txt.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
from common import Check, parser_of, place, report
from controls import demo

from tidegate.config import Settings, load_settings
from tidegate.envs.base import load_environment
from tidegate.settings.losses import DAPOLoss

ROOT = Path(__file__).parents[1]
GOAL = 0.9
"""Held-out reward up to which time and CPU are counted."""
LIMIT_S = 3600.0
"""Seconds after which a run is ended, and fails."""
TRAINING_TASKS = 4096
"""Tasks exported for TRL, which draws from them; Tidegate makes them without end by the same rule."""


def cpu_seconds(process: psutil.Process) -> float:
    """CPU seconds of a process tree, with its children that ended and were waited for."""
    total = 0.0
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            total += sum(one.cpu_times()[:4])
    return total


def evaluations(file: Path, reward: str) -> list[float]:
    """Held-out rewards in a file of JSON lines, in their order; a line that is being written is left out."""
    if not file.is_file():
        return []
    lines = file.read_text(encoding="utf-8").split("\n")[:-1]
    return [line[reward] for line in map(json.loads, lines) if line.get(reward) is not None]


def follow(name: str, command: list[str], file: Path, reward: str, log: Path, least: int) -> dict[str, Any]:
    """Runs a training command until it has `least` evaluations, one of which reached the goal, or ends.

    Returns its rewards, and time and CPU seconds to the goal.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(os.cpu_count())} if name == "trl" else None
    began, rows, cpu = time.monotonic(), list[dict[str, float]](), 0.0
    with log.open("w", encoding="utf-8") as output, subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
    ) as started:  # fmt: skip
        tree = psutil.Process(started.pid)
        while started.poll() is None:
            cpu = max(cpu, cpu_seconds(tree))
            for value in evaluations(file, reward)[len(rows) :]:
                rows.append({"reward": value, "wall_s": time.monotonic() - began, "cpu_s": cpu})
            if over(rows, least) or time.monotonic() - began > LIMIT_S:
                started.send_signal(signal.SIGINT if name == "tidegate" else signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.wait(timeout=1.0)
    for value in evaluations(file, reward)[len(rows) :]:
        rows.append({"reward": value, "wall_s": time.monotonic() - began, "cpu_s": cpu})
    if (started.returncode and not over(rows, least)) or len(rows) < least:
        raise SystemExit(f"{name} ended with code {started.returncode} after {len(rows)} evaluations: {log}")
    reached = next((row for row in rows if row["reward"] >= GOAL), None)
    return {
        "run": name,
        "rewards": [round(row["reward"], 3) for row in rows],
        "wall_s": rows[-1]["wall_s"],
        "cpu_s": rows[-1]["cpu_s"],
        "wall_to_goal_s": None if reached is None else reached["wall_s"],
        "cpu_to_goal_s": None if reached is None else reached["cpu_s"],
    }


def over(rows: list[dict[str, float]], least: int) -> bool:
    return len(rows) >= least and any(row["reward"] >= GOAL for row in rows)


def plan(settings: Settings, directory: Path, seed: int) -> dict[str, Any]:
    """Tasks and settings for TRL."""
    environment = load_environment(settings.env.use, settings.env.options)
    loss = settings.trainer.loss
    assert isinstance(loss, DAPOLoss), "the benchmark gives TRL the clipping range of dapo"

    def rows(tasks: Iterator[Any]) -> list[dict[str, Any]]:
        return [{"prompt": task.messages, "answer": task.answer} for task in tasks]

    trainer, held_out = settings.trainer, environment.eval_sets()[""][: settings.eval.tasks]
    return {
        "model": str(settings.model.path.absolute()), "directory": str(directory), "seed": seed,
        "evaluations": str(directory / "evaluations.jsonl"), "max_tokens": settings.sampling.max_tokens,
        "groups": trainer.groups_per_batch, "group_size": trainer.group_size, "steps": trainer.steps,
        "learning_rate": trainer.learning_rate, "weight_decay": trainer.weight_decay,
        "max_grad_norm": trainer.max_grad_norm, "clip_low": loss.clip_low, "clip_high": loss.clip_high,
        "every": settings.eval.every, "tasks": settings.eval.tasks,
        "interim_tasks": settings.eval.interim_tasks,
        "training": rows(environment.train_task(index) for index in range(TRAINING_TASKS)),
        "evaluation": {"reward": rows(iter(held_out))},
    }  # fmt: skip


def pair(
    python: str, config: Path, laid: list[str], directory: Path, seed: int, least: int
) -> Iterator[dict[str, Any]]:
    """Trains by both with one seed, for at least so many evaluations."""
    ours = [*laid, f"--run.dir={directory}", f"--run.name=tidegate-{seed}", f"--run.seed={seed}"]
    settings = load_settings(config, ours)
    command = [sys.executable, "-m", "tidegate", "train", str(config), *ours]
    log = directory / f"tidegate-{seed}.log"
    yield {
        "seed": seed,
        **follow("tidegate", command, settings.run_dir / "metrics.jsonl", "eval/reward", log, least),
    }

    place = directory / f"trl-{seed}"
    place.mkdir()
    (place / "plan.json").write_text(json.dumps(plan(settings, place, seed)), encoding="utf-8")
    command = [python, str(Path(__file__).with_name("trl_words.py")), str(place / "plan.json")]
    yield {
        "seed": seed,
        **follow("trl", command, place / "evaluations.jsonl", "reward", place / "log", least),
    }


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--trl", required=True, metavar="PYTHON")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--every", type=int, default=6, help="steps between evaluations")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the runs in DIR")
    arguments = parser.parse_args()
    with place(arguments.keep, "trl") as directory, demo("words", directory) as (config, model):
        least = arguments.steps // arguments.every + 1
        laid = [*model, f"--trainer.steps={2 * arguments.steps}", f"--eval.every={arguments.every}"]
        laid.append("--trainer.until=1000")  # no reward of the demo: all steps are taken
        # TRL's own loss and optimiser, so that both take the same steps.
        laid += ["--trainer.loss.name=dapo", "--trainer.beta1=0.9", "--trainer.max_grad_norm=1"]
        rows = [
            row
            for seed in range(arguments.seeds)
            for row in pair(arguments.trl, config, laid, directory.absolute(), seed, least)
        ]
    by = {name: [row for row in rows if row["run"] == name] for name in ("tidegate", "trl")}

    def ratio(key: str) -> float | None:
        """Ratio of the means; None if a run of Tidegate did not get there. TRL's whole run counts then."""
        ours = [row[f"{key}_to_goal_s"] for row in by["tidegate"]]
        theirs = [row[f"{key}_to_goal_s"] or row[f"{key}_s"] for row in by["trl"]]
        return None if None in ours else fmean(ours) / fmean(theirs)

    after = {name: fmean(row["rewards"][least - 1] for row in runs) for name, runs in by.items()}
    return report(rows, [
        Check("wall_vs_trl", ratio("wall"), "<=", 0.35),
        Check("cpu_seconds_vs_trl", ratio("cpu"), "<=", 0.5),
        Check("reward_vs_trl", after["tidegate"] - after["trl"], ">=", 0.0),
    ], as_json=arguments.json)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())

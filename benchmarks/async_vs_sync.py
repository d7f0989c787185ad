"""Compares asynchronous with synchronous training on the demo with a tool that sleeps.

Two arms train the same model on the same problems to the same held-out reward: `async` with a staleness of
at most 3 (an episode with a slow tool spans more steps than one without), and `on_policy` with
`trainer.on_policy`, which is exactly synchronous. Each tool call sleeps for a log-normal time within
0.1–3 s, drawn with the session's seed. Dynamic sampling is off in both arms, so that a step is the same work
in each and no group is filtered; the share of groups with variance in their rewards (`informative`) is
reported.

Time is measured from the start of the first step and includes no evaluation: the arms write a checkpoint
every few steps, and one engine evaluates these afterwards, on the same held-out problems with the same seeds.
Isotonic regression makes the reward curve monotone; the time to the target is read from that curve. Each pair
of arms runs with several seeds, in turns; times are summed over the seeds.

    python benchmarks/async_vs_sync.py [--json] [--seeds 2] [--target 0.8] [--keep DIR]
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from common import Check, parser_of, place, report

from tidegate.config import Settings, load_settings
from tidegate.envs.base import load_environment
from tidegate.trainer.ledger.audit import audit_run
from tidegate.trainer.processes.launcher import start_processes
from tidegate.trainer.processes.servers import LocalProcesses
from tidegate.trainer.processes.supervisor import TaskSupervisor
from tidegate.trainer.publish.engine_control import EngineControl
from tidegate.trainer.records.metrics import read_metrics
from tidegate.trainer.rollout.episodes import EpisodeSource
from tidegate.trainer.rollout.evaluator import Evaluator
from tidegate.trainer.run import Run
from tidegate.viewer.live import make_view

HERE = Path(__file__).parent
DEMO = HERE.parent / "examples" / "demo" / "config.toml"
EVERY = 2
"""Steps between checkpoints, which are the points of the curve."""
ARMS = {
    "async": ["--trainer.max_staleness=3"],
    "on_policy": ["--trainer.on_policy=true", "--trainer.max_staleness=0"],
}
SMALLER = ["--trainer.groups_per_batch=8", "--trainer.learning_rate=3e-4", "--trainer.schedule=constant"]
"""Half of the demo's batch: with a full batch, two cores would be the bottleneck, and not the tool."""
LOSS = ["--trainer.loss.name=dapo"]
"""The loss of both arms: staleness reduces its reward least (docs/losses.md)."""


def settings_of(directory: Path, arm: str, seed: int, steps: int, median_s: float) -> Settings:
    """Settings for one extra step, because the time of the last step includes the final evaluation."""
    overrides = [
        f"--run.dir={directory}", f"--run.name={arm}-{median_s:g}s-seed{seed}", f"--run.seed={seed}",
        f"--agent.use={HERE}/slow_solver.py:SlowSolver", f"--agent.options={{median_s = {median_s}}}",
        "--trainer.dynamic_sampling=false", *SMALLER, *LOSS,
        f"--trainer.steps={steps + 1}", f"--trainer.checkpoint_every={EVERY}",
        f"--trainer.keep_checkpoints={steps}", "--eval.every=0", "--eval.tasks=16", *ARMS[arm],
    ]  # fmt: skip
    return load_settings(DEMO, overrides)


def train(settings: Settings) -> dict[int, float]:
    """Runs an arm; returns the seconds from the start of the first step to the end of each step."""
    view = make_view(False, settings.trainer.steps, settings.trainer.staleness_bound)
    environment = load_environment(settings.env.use, settings.env.options)
    asyncio.run(Run(settings, environment, view).train())
    lines = read_metrics(settings.run_dir)
    return {line["step"]: line["time"] - lines[0]["time"] for line in lines}


async def unsaved(*_: object) -> None: ...


async def evaluate(settings: Settings, steps: Sequence[int], tasks: int) -> dict[int, float]:
    """Held-out reward of each checkpoint of a run, sampled as in training, without the tool's sleep."""
    checkpoints = {step: settings.run_dir.absolute() / "checkpoints" / f"step_{step}" for step in steps}
    quick = load_settings(DEMO, [f"--eval.interim_tasks={tasks}", f"--run.seed={settings.run.seed}"])
    first = checkpoints[steps[0]]
    sets = load_environment(quick.env.use, quick.env.options).eval_sets()
    view, guard = make_view(False, 0, None), TaskSupervisor()
    rewards = {}
    async with contextlib.AsyncExitStack() as stack:
        where = settings.run_dir / "evaluation"
        processes = await start_processes(
            quick, where, lambda: (first, 0), guard, view.note, stack, LocalProcesses()
        )
        stack.push_async_callback(guard.close)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        episodes = EpisodeSource.of(quick.agent, processes.gateway)
        evaluator = Evaluator(
            settings=quick, episodes=episodes, sets={"": list(sets[""])}, observer=view, save=unsaved
        )
        for step, weights in checkpoints.items():
            await EngineControl(processes.engines.urls()[0], http).load(weights, step)
            found = await evaluator.interim(step)
            rewards[step] = found.metrics["eval/reward"]
    return rewards


def monotone(values: Sequence[float]) -> list[float]:
    """Least-squares isotonic regression by pooling adjacent violators."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, size = value, 1
        while pools and pools[-1][0] >= mean:
            before, members = pools.pop()
            mean, size = (before * members + mean * size) / (members + size), members + size
        pools.append((mean, size))
    return [mean for mean, size in pools for _ in range(size)]


def reaches(seconds: Sequence[float], rewards: Sequence[float], target: float) -> float | None:
    """Time at which the monotone curve reaches the target, interpolated linearly between checkpoints."""
    curve = monotone(rewards)
    after = next((n for n, reward in enumerate(curve) if reward >= target), None)
    if after is None or after == 0:
        return None if after is None else seconds[0]
    span = slice(after - 1, after + 1)
    return float(np.interp(target, curve[span], seconds[span]))


def measure(settings: Settings, arm: str, target: float, tasks: int) -> dict[str, Any]:
    """Trains an arm; returns when it reached the target, and its token counts."""
    times = train(settings)
    steps = [step for step in times if step and step % EVERY == 0]
    rewards = asyncio.run(evaluate(settings, steps, tasks))
    lines = read_metrics(settings.run_dir)[1:]
    seconds = [times[step] for step in steps]
    numbers = [float(step) for step in steps]
    return {
        "run": settings.run.name,
        "arm": arm,
        "seconds_to_target": reaches(seconds, list(rewards.values()), target),
        "steps_to_target": reaches(numbers, list(rewards.values()), target),
        "seconds_a_step": times[steps[-1]] / steps[-1],
        "staleness": float(np.mean([line["staleness/mean"] for line in lines])),
        "goodput": lines[-1]["tokens/used_ratio"],
        "wasted": {
            cause: int(lines[-1][f"tokens/wasted_{cause}"])
            for cause in ("stale", "failed", "cancelled", "filtered")
        },
        "informative": 1 - float(np.mean([line["reward/zero_variance_ratio"] for line in lines])),
        "rewards": {step: round(reward, 3) for step, reward in rewards.items()},
        "audit": audit_run(settings.run_dir).consistent,
    }


def speedup(results: Sequence[dict[str, Any]]) -> float | None:
    """Synchronous seconds ÷ asynchronous seconds, each summed over the seeds."""
    sums = dict.fromkeys(ARMS, 0.0)
    for result in results:
        if result["seconds_to_target"] is None:
            return None
        sums[result["arm"]] += result["seconds_to_target"]
    return sums["on_policy"] / sums["async"]


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=2, help="number of pairs of runs with the sleeping tool")
    parser.add_argument("--steps", type=int, default=24, help="steps per run")
    parser.add_argument("--target", type=float, default=0.8, help="sampled held-out reward to reach")
    parser.add_argument("--tasks", type=int, default=300, help="held-out problems per evaluation")
    parser.add_argument("--median", type=float, default=0.5, help="median sleep of the tool, in seconds")
    parser.add_argument("--keep", type=Path, help="directory in which to keep the runs")
    arguments = parser.parse_args()

    def pairs(directory: Path, seeds: int, median_s: float) -> list[dict[str, Any]]:
        return [
            measure(
                settings_of(directory, arm, seed, arguments.steps, median_s),
                arm, arguments.target, arguments.tasks,
            )
            for seed in range(seeds)
            for arm in ARMS
        ]  # fmt: skip

    with place(arguments.keep, "async") as directory:
        slow = pairs(directory, arguments.seeds, arguments.median)
        quick = pairs(directory, 1, 0.0)
    print("dynamic sampling is off in every arm; times exclude evaluation")
    without = speedup(quick)
    print(f"without the sleep: speedup {'none, target missed' if without is None else f'{without:.2f}'}")
    checks = [
        Check("speedup", speedup(slow), ">=", 1.8),
        Check("goodput", min(one["goodput"] for one in slow if one["arm"] == "async"), ">=", 0.9),
        Check("audits_hold", float(all(one["audit"] for one in slow + quick)), "==", 1.0),
    ]
    return report([*slow, *quick, {"speedup_without_sleep": without}], checks, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())

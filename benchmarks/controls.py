"""Runs the controls of a demo, which show that learning causes its reward.

Short runs of a demo: with learning rate 0, three with the rewards shuffled within each batch, and one with
another seed. Training on noise moves a policy somewhere, so a single run of it may rise or fall; the mean
over three seeds is checked. The plain model also recomputes the recorded logprobs.

    python benchmarks/controls.py [--demo search|service|shell|words] [--json] [--steps 80] [--shuffles 3]
                                  [--keep DIR]
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from common import Check, parser_of, place, report

from tidegate.config import Settings, TrainerSettings, load_settings
from tidegate.envs.base import load_environment
from tidegate.trainer.batch.credit import Advantage, BaselineCredit, CreditAssignment
from tidegate.trainer.ledger.audit import audit_run
from tidegate.trainer.records.metrics import read_metrics
from tidegate.trainer.run import Run
from tidegate.types import Group
from tidegate.viewer.live import make_view

EXAMPLES = Path(__file__).parents[1] / "examples"
GOALS = {
    "calculator": [("after", 0.90)],
    "search": [("after", 0.80), ("after_greedy", 0.90)],
    "service": [("after", 0.80)],
    "shell": [("after", 0.85)],
    "words": [("after", 0.90), ("unseen_wordings", 0.90)],
}
"""Demo → minimum reward of its seeded run."""
CONFIGS = {"calculator": "demo/config.toml", "service": "service/config.toml", "shell": "shell/config.toml"}
"""Settings files of the demos that need no service beside the run."""
CONTROL_STEPS = {"calculator": 100, "search": 25, "service": 25, "shell": 25, "words": 24}
"""Steps of the controls: 300 to 400 groups, and 100 of 16 episodes of `words`."""


@contextlib.contextmanager
def demo(name: str, directory: Path) -> Iterator[tuple[Path, list[str]]]:
    """Settings file of a demo, and overrides for the services that run inside the block."""
    if name in CONFIGS:
        yield EXAMPLES / CONFIGS[name], []
        return
    if name == "words":
        sys.path.append(str(EXAMPLES / "words"))  # fetches and warms up the model as `make demo` does
        from demo import CONFIG, prepare, run

        prepare(load_settings(CONFIG, []))
        run([sys.executable, "-m", "tidegate", "sft", str(CONFIG), f"--run.dir={directory}"])
        yield CONFIG, [f"--model.path={directory / 'words-sft' / 'model'}"]
        return
    sys.path.append(str(EXAMPLES / "demo_search"))  # starts the server as `make demo-search` does
    from demo import CONFIG, retrieval_overrides, serve_worlds

    with serve_worlds(directory / "corpus") as url:
        yield CONFIG, retrieval_overrides(url)


def shuffled(settings: TrainerSettings, seed: int) -> CreditAssignment:
    """Credit assignment that shuffles a batch's advantages among its trajectories."""
    rng = random.Random(seed)
    plain = BaselineCredit(settings)

    def credit(groups: Sequence[Group]) -> list[list[Advantage]]:
        advantages = plain(groups)
        deck = [one for group in advantages for one in group]
        rng.shuffle(deck)
        return [[deck.pop() for _ in group] for group in advantages]

    return credit


def train(settings: Settings, credit: CreditAssignment | None = None) -> dict[str, Any]:
    """Trains; returns the held-out reward before and after."""
    began = time.monotonic()
    view = make_view(False, settings.trainer.steps, settings.trainer.staleness_bound)
    environment = load_environment(settings.env.use, settings.env.options)
    result = asyncio.run(Run(settings, environment, view, credit=credit).train())
    metrics = read_metrics(settings.run_dir)
    others = {
        key.removeprefix("eval/reward_"): value
        for key, value in result.final_eval.items()
        if key.startswith("eval/reward_") and not key.endswith("_greedy")
    }
    errors = [line["logprob_max_error"] for line in metrics if line.get("logprob_max_error") is not None]
    return {
        "run": settings.run.name,
        "before": result.initial_eval["eval/reward"],
        "after": result.final_eval["eval/reward"],
        "before_greedy": result.initial_eval["eval/reward_greedy"],
        "after_greedy": result.final_eval["eval/reward_greedy"],
        **others,
        "logprob_max_error": max(errors, default=None),
        "audit": audit_run(settings.run_dir).consistent,
        "seconds": round(time.monotonic() - began, 1),
    }


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--demo", choices=GOALS, default="calculator")
    parser.add_argument("--steps", type=int, default=None, help="steps of the seeded run (the demo's)")
    parser.add_argument("--control-steps", type=int, help="steps of the controls (by demo)")
    parser.add_argument("--shuffles", type=int, default=3, help="runs with shuffled rewards")
    parser.add_argument("--keep", type=Path, help="directory in which to keep the runs")
    arguments = parser.parse_args()

    control = f"--trainer.steps={arguments.control_steps or CONTROL_STEPS[arguments.demo]}"
    steps = [f"--trainer.steps={arguments.steps}"] if arguments.steps else []
    with (
        place(arguments.keep, "controls") as directory,
        demo(arguments.demo, directory) as (config, laid),
    ):

        def settings(name: str, *overrides: str) -> Settings:
            where = [f"--run.dir={directory}", f"--run.name={name}"]
            return load_settings(config, [*where, *laid, *overrides])

        frozen = train(settings("learning_rate_0", control, "--trainer.learning_rate=0"))
        dealt = []
        for seed in range(arguments.shuffles):
            # Training on noise may make all rewards of a group equal; such groups are kept.
            dealing = settings(
                f"shuffled_rewards_{seed}",
                control,
                "--trainer.dynamic_sampling=false",
                f"--run.seed={seed}",
            )
            dealt.append(train(dealing, shuffled(dealing.trainer, seed)))
        seeded = train(settings("another_seed", "--run.seed=1", *steps))
    checks = [
        Check("learning_rate_0_change", abs(frozen["after"] - frozen["before"]), "<=", 0.05),
        Check("shuffled_rewards_rise", fmean(run["after"] - run["before"] for run in dealt), "<=", 0.05),
        *(Check(f"another_seed_{name}", seeded[name], ">=", goal) for name, goal in GOALS[arguments.demo]),
        Check("logprob_max_error", seeded["logprob_max_error"], "<=", 1e-3),
        Check("audits_hold", float(all(one["audit"] for one in (frozen, *dealt, seeded))), "==", 1.0),
    ]
    return report([frozen, *dealt, seeded], checks, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())

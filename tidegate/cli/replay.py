"""`tidegate replay`: training steps again, from the files."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from tidegate.cli.verbs import Verbs, run_directory

if TYPE_CHECKING:
    from tidegate.trainer.replay import Replayed

DESCRIPTION = """\
Take a run's optimiser steps again from its recorded trajectories, without engines. As it was, every loss and
every parameter must come out the same, to the last bit; it exits with 1 where one does not. With --set it
asks 'what if': the same batches under other trainer settings.
"""
SHOWN = ("loss", "grad_norm", "entropy", "mismatch_kl", "clip_fraction")


def add(verbs: Verbs) -> None:
    verb = verbs.add_parser(
        "replay", help="take a run's training steps again from its files", description=DESCRIPTION
    )
    verb.add_argument("run_dir", type=Path, metavar="RUN")
    verb.add_argument(
        "--from", dest="first", type=int, default=0, metavar="STEP", help="a step with a checkpoint"
    )
    verb.add_argument("--until", type=int, metavar="STEP", help="the last step to take")
    verb.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="another setting: trainer.loss=gspo"
    )
    verb.add_argument("--out", type=Path, metavar="DIR", help="write the weights that come out")
    verb.add_argument("--json", action="store_true", help="an object a step instead of the table")
    verb.set_defaults(run=run)


def run(arguments: argparse.Namespace, _: list[str]) -> int:
    from tidegate.config import load_settings
    from tidegate.trainer.replay import Replay

    overrides = [f"--{one}" for one in arguments.set]
    run_dir = run_directory(arguments.run_dir)
    settings = load_settings(run_dir / "config.toml", overrides)
    replay = Replay(run_dir, settings, arguments.first, arguments.until)
    replay.steps()  # what is wrong with the files is said before a model is loaded
    policy = replay.start()
    steps = []
    for one in replay.run(policy):
        steps.append(one)
        print(json.dumps(_row(one)) if arguments.json else _line(one, len(steps) == 1), flush=True)
    if arguments.out is not None:
        policy.save_weights(arguments.out)
    if overrides:
        return 0
    different = [one.step for one in steps if not one.same]
    if not arguments.json:
        print(
            f"steps {different} differ"
            if different
            else f"all {len(steps)} steps are the same, to the last bit"
        )
    return 1 if different else 0


def _line(one: Replayed, first: bool) -> str:
    head = f"{'step':>5}" + "".join(f"{name:>26}" for name in SHOWN) + f"{'weights':>10}\n" if first else ""
    cells = [f"{_short(one.before.get(name))} → {_short(one.now[name])}" for name in SHOWN]
    weights = {None: "", True: "the same", False: "differ"}[one.same_weights]
    return f"{head}{one.step:>5}" + "".join(f"{cell:>26}" for cell in cells) + f"{weights:>10}"


def _row(one: Replayed) -> dict[str, object]:
    before = {name: one.before.get(name) for name in one.now}
    return {
        "step": one.step,
        "same": one.same,
        "same_weights": one.same_weights,
        "before": before,
        "now": one.now,
    }


def _short(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.6g}"

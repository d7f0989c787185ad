"""`tidegate replay`: repeats training steps from a run's files."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from tidegate.cli.commands import Subparsers, enter_start_directory, run_directory, takes_settings
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from tidegate.trainer.replay import Replayed

DESCRIPTION = """\
Repeat a run's steps from its recorded trajectories, without engines. With unchanged settings
every loss and every parameter must be bit-identical; otherwise the exit status is 1. With
--section.key value the same batches are trained on with other trainer settings.
"""
SHOWN = ("loss", "grad_norm", "entropy", "mismatch_kl", "clip_fraction")


def add(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "replay",
        help="repeat a run's training steps from its files",
        usage="tidegate replay RUN [options] [--section.key value ...]",
        description=DESCRIPTION,
    )
    parser.add_argument(
        "--from", dest="first", type=int, default=0, metavar="STEP",
        help="start at this step, which has a checkpoint",
    )  # fmt: skip
    parser.add_argument("--until", type=int, metavar="STEP", help="the last step")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the resulting weights")
    parser.add_argument("--json", action="store_true", help="print one object per step instead of the table")
    takes_settings(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    from tidegate.config import load_settings
    from tidegate.service.directory_lock import refuse_if_in_use
    from tidegate.settings.reading import split_words
    from tidegate.trainer.replay import Replay

    words, overrides = split_words(rest)
    if len(words) != 1:
        raise ConfigError(f"name one run: tidegate replay RUN, not {' '.join(words) or 'none'}")
    run_dir = run_directory(Path(words[0]))
    run_dir, arguments.out = enter_start_directory(run_dir / "config.toml", run_dir, arguments.out)
    if arguments.out is not None:
        refuse_if_in_use(arguments.out)
    settings = load_settings(run_dir / "config.toml", overrides)
    replay = Replay(run_dir, settings, arguments.first, arguments.until)
    replay.steps()  # checks the files before a model is loaded
    policy = replay.start()
    steps = []
    for step in replay.run(policy):
        steps.append(step)
        print(json.dumps(_row(step)) if arguments.json else _line(step, len(steps) == 1), flush=True)
    if arguments.out is not None:
        policy.save_weights(arguments.out)
    if overrides:
        return 0
    different = [step.step for step in steps if not step.same]
    if not arguments.json:
        print(
            f"steps {different} differ"
            if different
            else f"all {len(steps)} steps are the same, to the last bit"
        )
    return 1 if different else 0


def _line(step: Replayed, first: bool) -> str:
    head = f"{'step':>5}" + "".join(f"{name:>26}" for name in SHOWN) + f"{'weights':>10}\n" if first else ""
    cells = [f"{_short(step.before.get(name))} → {_short(step.now[name])}" for name in SHOWN]
    weights = {None: "", True: "the same", False: "differ"}[step.same_weights]
    return f"{head}{step.step:>5}" + "".join(f"{cell:>26}" for cell in cells) + f"{weights:>10}"


def _row(step: Replayed) -> dict[str, object]:
    before = {name: step.before.get(name) for name in step.now}
    return {
        "step": step.step,
        "same": step.same,
        "same_weights": step.same_weights,
        "before": before,
        "now": step.now,
    }


def _short(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.6g}"

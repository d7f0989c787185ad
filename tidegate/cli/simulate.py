"""`tidegate simulate`: simulates a run on other machines."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from tidegate.cli.verbs import Verbs

if TYPE_CHECKING:
    from tidegate.simulation.scenario import Scenario

DESCRIPTION = """\
Simulate runs with the admission core that real runs use, and say how fast they train, how stale, and
what is wasted. Start from a scenario's TOML file (--scenario), from a real run's files (--from), or from
the defaults; --section.key value changes single keys (--keys lists them).
"""


def add(verbs: Verbs) -> None:
    verb = verbs.add_parser(
        "simulate",
        help="ask which staleness, and which ratio of engines to trainers",
        description=DESCRIPTION,
    )
    verb.add_argument("--scenario", type=Path, metavar="FILE", help="a scenario's TOML file")
    verb.add_argument("--from", dest="run_dir", type=Path, metavar="RUN", help="calibrate from a run's files")
    verb.add_argument("--staleness", default="", help="bounds to compare: 0,1,2,4,none")
    verb.add_argument(
        "--accelerators", type=int, help="share so many between engines and trainers, in all ratios"
    )
    verb.add_argument("--split", default="", help="engines:trainers to compare: 96:32,64:64")
    verb.add_argument("--plot", type=Path, metavar="FILE", help="draw it into a PNG, SVG or PDF file")
    verb.add_argument("--json", action="store_true", help="one object instead of the table")
    verb.add_argument("--keys", action="store_true", help="list a scenario's keys and end")
    verb.set_defaults(run=run, takes_settings=True)


def run(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from tidegate.simulation.sweep import check_plot, plot, splits_of, sweep, table

    if arguments.keys:
        return _list_keys()
    if arguments.plot is not None:
        check_plot(arguments.plot)
    scenario = _scenario(arguments, overrides)
    splits = [(scenario.engine.count, scenario.trainer.count)]
    if arguments.accelerators is not None:
        splits = splits_of(_at_least("--accelerators", arguments.accelerators, 2))
    if arguments.split:
        splits = [_split(word) for word in arguments.split.split(",")]
    bounds = [_bound(word) for word in arguments.staleness.split(",") if word]
    cells = list(sweep(scenario, splits, bounds or [scenario.rules.max_staleness]))
    if arguments.plot is not None:
        plot(cells, arguments.plot)
    if arguments.json:
        rows = [
            {"engines": one.engines, "trainers": one.trainers, "max_staleness": one.staleness}
            | one.figures.to_wire()
            for one in cells
        ]
        print(json.dumps({"cells": rows}))
    else:
        print(table(cells))
    return 0


def _scenario(arguments: argparse.Namespace, overrides: list[str]) -> Scenario:
    from tidegate.errors import ConfigError
    from tidegate.settings.sections import load, overlay
    from tidegate.simulation.calibrate import scenario_of
    from tidegate.simulation.scenario import Scenario

    if arguments.run_dir is not None and arguments.scenario is not None:
        raise ConfigError("give --scenario FILE or --from RUN, not both")
    if arguments.run_dir is not None:
        return overlay(scenario_of(arguments.run_dir), overrides)
    return overlay(load(Scenario, arguments.scenario), overrides)


def _list_keys() -> int:
    from tidegate.settings.sections import known_keys
    from tidegate.simulation.scenario import Scenario

    for key, default, text in known_keys(Scenario):
        print(f"{key} = {default}" + (f"    # {text}" if text else ""))
    return 0


def _bound(word: str) -> int | None:
    return None if word == "none" else _number("--staleness", word, 0)


def _split(word: str) -> tuple[int, int]:
    engines, _, trainers = word.partition(":")
    return _number("--split", engines, 1), _number("--split", trainers, 1)


def _number(name: str, word: str, least: int) -> int:
    from tidegate.errors import ConfigError

    try:
        return _at_least(name, int(word), least)
    except ValueError:
        raise ConfigError(f"{name}: {word!r} is not a whole number") from None


def _at_least(name: str, value: int, least: int) -> int:
    from tidegate.errors import ConfigError

    if value < least:
        raise ConfigError(f"{name}: {value} is less than {least}")
    return value

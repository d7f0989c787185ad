"""`tidegate simulate`: simulates a run on other machines."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tidegate.cli.commands import Subparsers, takes_settings
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from tidegate.simulation.scenario import Scenario

DESCRIPTION = """\
Simulate runs with the admission rules of real runs, and print their throughput, staleness and wasted
tokens. Start from a scenario's TOML file, from a real run's files (--from), or from the defaults.
--ceilings prints the load of gateway, trainer and publishing, and which of them is the bottleneck.
"""


def add(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "simulate",
        help="compare staleness bounds and ratios of engines to trainers",
        usage="tidegate simulate [SCENARIO.toml | --from RUN] [options] [--section.key value ...]",
        description=DESCRIPTION,
    )
    parser.add_argument(
        "--from", dest="run_dir", type=Path, metavar="RUN", help="calibrate from a run's files"
    )
    parser.add_argument("--staleness", default="", help="bounds to compare: 0,1,2,4,none")
    parser.add_argument(
        "--accelerators", type=int, help="compare all ways to divide this number between engines and trainers"
    )
    parser.add_argument("--split", default="", help="engines:trainers to compare: 96:32,64:64")
    parser.add_argument(
        "--ceilings", action="store_true", help="print the load of each single process instead of the table"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a chart to a PNG, SVG or PDF file")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    takes_settings(parser, "tidegate.simulation.scenario:Scenario")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    from tidegate.simulation.sweep import Cell, check_plot, plot, scenarios, splits_of, table

    if arguments.plot is not None:
        check_plot(arguments.plot)
    scenario = _scenario(arguments, rest)
    splits = [(scenario.engine_count, scenario.trainer.count)]
    if scenario.policies and (arguments.split or arguments.accelerators is not None):
        raise ConfigError(
            "--split and --accelerators divide accelerators between one policy's engines and the trainers; "
            f"this scenario has the policies {', '.join(scenario.policies)}: set policies.NAME.count instead"
        )
    if arguments.accelerators is not None:
        splits = splits_of(_at_least("--accelerators", arguments.accelerators, 2))
    if arguments.split:
        splits = [_split(word) for word in arguments.split.split(",")]
    bounds = [_bound(word) for word in arguments.staleness.split(",") if word]
    compared = scenarios(scenario, splits, bounds or [scenario.rules.max_staleness])
    if arguments.ceilings:
        return _ceilings(arguments, compared)
    cells = [Cell.of(one) for one in compared]
    if arguments.plot is not None:
        plot(cells, arguments.plot)
    if arguments.json:
        rows = [
            {"engines": cell.engines, "trainers": cell.trainers, "max_staleness": cell.staleness}
            | asdict(cell.figures)
            for cell in cells
        ]
        print(json.dumps({"cells": rows}))
    else:
        print(table(cells))
    return 0


def _ceilings(arguments: argparse.Namespace, scenarios: Iterable[Scenario]) -> int:
    """Prints the loads of the components in each scenario."""
    from tidegate.simulation.ceilings import Rates, ceilings_table, part_of, to_wire
    from tidegate.simulation.costs import MEASURED_ON, Costs
    from tidegate.simulation.world import SimulatedRun

    if arguments.plot is not None:
        raise ConfigError("--plot draws the table, which --ceilings replaces; leave one of them out")
    rows = []
    for one in scenarios:
        part, parts = part_of(one)
        rates = Rates.of(SimulatedRun(part).run(), part, parts)
        head = {
            "engines": one.engine_count,
            "trainers": one.trainer.count,
            "max_staleness": one.rules.max_staleness,
            "simulated_parts": parts,
        }
        rows.append(head | to_wire(rates, one))
        if not arguments.json:
            own = one.costs.other_than_default(*Costs.model_fields)
            given = f"; {', '.join(own)} as given" if own else ""
            print(f"{ceilings_table(rates, one)}\ncosts: measured on {MEASURED_ON}{given}\n")
    if arguments.json:
        print(json.dumps({"cells": rows}))
    return 0


def _scenario(arguments: argparse.Namespace, rest: list[str]) -> Scenario:
    from tidegate.settings.reading import load, overlay, split_file
    from tidegate.simulation.calibrate import scenario_of
    from tidegate.simulation.scenario import Scenario

    file, overrides = split_file(rest)
    if file is not None and file.is_dir():
        raise ConfigError(f"{file} is a directory: for a run, tidegate simulate --from {file}")
    if arguments.run_dir is None:
        return load(Scenario, file, overrides)
    if file is not None:
        raise ConfigError(f"give the scenario {file} or --from RUN, not both")
    return overlay(scenario_of(arguments.run_dir), overrides)


def _bound(word: str) -> int | None:
    return None if word == "none" else _number("--staleness", word, 0)


def _split(word: str) -> tuple[int, int]:
    engines, _, trainers = word.partition(":")
    return _number("--split", engines, 1), _number("--split", trainers, 1)


def _number(name: str, word: str, least: int) -> int:
    try:
        return _at_least(name, int(word), least)
    except ValueError:
        raise ConfigError(f"{name}: {word!r} is not a whole number") from None


def _at_least(name: str, value: int, least: int) -> int:
    if value < least:
        raise ConfigError(f"{name}: {value} is less than {least}")
    return value

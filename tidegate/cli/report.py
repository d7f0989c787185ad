"""`tidegate report`: writes a run's report again."""

from __future__ import annotations

import argparse
from pathlib import Path

from tidegate.cli.commands import Subparsers, run_directory


def add(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "report", help="write a run's report.html again", description="Write report.html and reward.png."
    )
    parser.add_argument("run_dir", type=Path)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, _: list[str]) -> int:
    from tidegate.viewer.report import write_report

    print(write_report(run_directory(arguments.run_dir)))
    return 0

"""`tidegate judge`: compares a judge with labelled data."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tidegate.cli.commands import Subparsers, takes_settings
from tidegate.errors import ConfigError


def add(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "judge",
        help="compare a judge with labelled data",
        description="Have a judge score labelled attempts, and print how its scores agree with the labels: "
        "accuracy and confusion at a threshold, and AUC or rank correlation with an interval.",
        epilog="Exits with 1 if the judge gave no valid verdict on a row.",
    )
    parser.add_argument(
        "--gold", type=Path, required=True, metavar="FILE", help="JSONL file of {prompt, output, label}"
    )
    parser.add_argument(
        "--judge", type=Path, metavar="FILE", help="settings with [env.judge], such as a run's config.toml"
    )
    parser.add_argument(
        "--threshold", type=float, default=0.5, help="lowest score, and label, that count as good (0.5)"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    takes_settings(parser, "tidegate.settings.judge:JudgeCommand")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    from tidegate.evaluation.agreement import agreement, agreement_lines, read_labelled
    from tidegate.settings.judge import JudgeCommand
    from tidegate.settings.reading import load

    judge = load(JudgeCommand, arguments.judge, rest, only=("env", "judge")).env.judge.resolved()
    if judge.url is None:
        raise ConfigError(
            "there is no judge: name a settings file with --judge, or give --env.judge.url, "
            "--env.judge.model and --env.judge.rubric"
        )
    rows = read_labelled(arguments.gold)
    figures = agreement(judge, rows, arguments.threshold)
    if arguments.json:
        print(json.dumps(figures))
    else:
        print("\n".join(agreement_lines(figures)))
    return 1 if figures["failed"] else 0

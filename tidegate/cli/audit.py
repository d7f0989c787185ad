"""`tidegate audit`: checks a run's ledger for consistency."""

from __future__ import annotations

import argparse
from pathlib import Path

from tidegate.cli.commands import Subparsers, run_directory


def add(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "audit",
        help="check a run's ledger for consistency",
        description="Check a run's ledger against its other files. Exits with 1 if it is inconsistent.",
    )
    parser.add_argument("run_dir", type=Path)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, _: list[str]) -> int:
    from tidegate.trainer.ledger.audit import audit_run
    from tidegate.trainer.ledger.audit_check import table

    audit = audit_run(run_directory(arguments.run_dir))
    print(table(audit))
    return 0 if audit.consistent else 1

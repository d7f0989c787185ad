"""`tidegate audit`: checks a run's ledger for consistency."""

from __future__ import annotations

import argparse
from pathlib import Path

from tidegate.cli.verbs import Verbs, run_directory


def add(verbs: Verbs) -> None:
    verb = verbs.add_parser(
        "audit",
        help="prove a run's ledger from its files",
        description="Prove a run's ledger from its files; exits with 1 if it is inconsistent.",
    )
    verb.add_argument("run_dir", type=Path)
    verb.set_defaults(run=run)


def run(arguments: argparse.Namespace, _: list[str]) -> int:
    from tidegate.trainer.ledger.audit import audit_run, table

    audit = audit_run(run_directory(arguments.run_dir))
    print(table(audit))
    return 0 if audit.consistent else 1

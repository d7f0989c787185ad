"""`tidegate tasks`: lists a run's tasks with their groups and failures, and lifts quarantines."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tidegate.cli.commands import Subparsers, run_directory
from tidegate.errors import ConfigError
from tidegate.loading import did_you_mean

if TYPE_CHECKING:
    from tidegate.trainer.ledger.tasks import TaskRecord

DESCRIPTION = """\
List the training tasks of a run with their groups, failed attempts by cause, and quarantines, from the
ledger. With --lift, quarantined tasks are issued again: the run's trainer enters it in the ledger within
seconds; without a running trainer, the next one (--resume) does.
"""
COLUMNS = ("issued", "trained", "filtered_solved", "filtered_failed", "stale", "failed", "cancelled", "live")


def add(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "tasks", help="list a run's tasks and their failures, lift quarantines", description=DESCRIPTION
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--quarantined", action="store_true", help="list quarantined tasks only")
    parser.add_argument("--json", action="store_true", help="print one object per task")
    parser.add_argument("--lift", nargs="*", metavar="TASK", help="lift the quarantine of these tasks")
    parser.add_argument("--all", action="store_true", help="with --lift: of all quarantined tasks")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, _: list[str]) -> int:
    from tidegate.trainer.checkpoint import checkpoint as checkpoints
    from tidegate.trainer.ledger.state import read_ledger_state
    from tidegate.trainer.ledger.tasks import task_records
    from tidegate.trainer.records.lift_requests import request_lift, requested_lifts

    run_dir = run_directory(arguments.run_dir)
    newest = checkpoints.latest(run_dir)
    committed = 0 if newest is None else int(newest.state["ledger"])
    records = task_records(read_ledger_state(run_dir / "ledger.jsonl"), committed)
    if arguments.lift is None and not arguments.all:
        chosen = [record for record in records if not arguments.quarantined or record.quarantine is not None]
        _print(chosen, requested_lifts(run_dir), as_json=arguments.json)
        return 0
    tasks = _to_lift(arguments, records)
    request_lift(run_dir, tasks)
    what = f"the quarantine of {len(tasks)} task{'s' * (len(tasks) != 1)} is lifted"
    print(f"requested: {what}. tidegate tasks {run_dir} --quarantined shows when it is done")
    return 0


def _to_lift(arguments: argparse.Namespace, records: list[TaskRecord]) -> list[str]:
    """Return the quarantined tasks that the command names. Raises ConfigError."""
    if arguments.lift is None or bool(arguments.lift) == arguments.all:
        raise ConfigError("give the tasks to issue again (--lift TASK …), or all of them (--lift --all)")
    if arguments.json or arguments.quarantined:
        raise ConfigError("--json and --quarantined apply to the list: leave them out with --lift")
    quarantined = [record.task for record in records if record.quarantine is not None]
    if not quarantined:
        raise ConfigError(f"{arguments.run_dir}: no task is quarantined")
    for task in arguments.lift:
        if task not in quarantined:
            known = any(record.task == task for record in records)
            why = (
                "is not quarantined" if known else f"is no task of this run{did_you_mean(task, quarantined)}"
            )
            raise ConfigError(f"{arguments.run_dir}: {task!r} {why}")
    return arguments.lift or quarantined


def _print(records: list[TaskRecord], requested: set[str], *, as_json: bool) -> None:
    from tidegate.viewer.formatting import printable

    if as_json:
        for record in records:
            lifting = record.quarantine is not None and record.task in requested
            print(json.dumps({**record.to_json(), "lift_requested": lifting}))
        return
    width = max([4, *(len(printable(record.task)) for record in records)])
    print(f"{'task':<{width}}" + "".join(f"{name:>{len(name) + 2}}" for name in COLUMNS) + "  failures")
    for record in records:
        row = record.to_json()
        row["trained"] += row["stepped"]
        cells = "".join(f"{row[name]:>{len(name) + 2}}" for name in COLUMNS)
        failures = ", ".join(f"{cause} {number}" for cause, number in row["failures"].items())
        print(f"{printable(record.task):<{width}}{cells}  {failures}".rstrip())
        if (entry := record.quarantine) is not None:
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry["time"]))
            note = "; its lift is requested" if record.task in requested else ""
            why = printable((entry.get("why") or "").partition("\n")[0])
            print(f"{'':<{width}}  quarantined {at}: {entry.get('outcome')}: {why}{note}")

"""`tidegate versions`: lists a run's versions, and promotes or rolls back one by hand."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tidegate.cli.commands import Subparsers, run_directory
from tidegate.errors import ConfigError

if TYPE_CHECKING:
    from tidegate.trainer.ledger.versions import VersionRecord

DESCRIPTION = """\
List the versions of a run with the results of their tests (trainer.promotion), or decide about one by
hand. The run's trainer carries a decision out within seconds or after its current step; without a running
trainer, the next one does.
"""


def add(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "versions", help="list a run's versions, promote or roll back one", description=DESCRIPTION
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="list the versions")
    listing.add_argument("run_dir", type=Path)
    listing.add_argument("--json", action="store_true", help="print one object per version")
    promote = actions.add_parser("promote", help="end the test of a version: it goes live")
    promote.add_argument("run_dir", type=Path)
    rollback = actions.add_parser(
        "rollback",
        help="end the test of a version: it is rolled back; without one, return to an earlier checkpoint",
    )
    rollback.add_argument("run_dir", type=Path)
    rollback.add_argument(
        "--step",
        type=int,
        help="step of the checkpoint to return to; by default the newest one before the live version",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace, _: list[str]) -> int:
    from tidegate.trainer.checkpoint import checkpoint as checkpoints
    from tidegate.trainer.ledger.ledger import read_ledger
    from tidegate.trainer.ledger.versions import version_records
    from tidegate.trainer.publish.version_requests import VersionRequest, write_request

    run_dir = run_directory(arguments.run_dir)
    records = version_records(read_ledger(run_dir / "ledger.jsonl"))
    saved = sorted(checkpoints.committed(run_dir))
    if arguments.action == "list":
        _print(records, saved, as_json=arguments.json)
        return 0
    tested = next((record for record in records if record.state == "in test"), None)
    if arguments.action == "promote":
        if tested is None:
            raise ConfigError(f"{run_dir}: no version is in test; tidegate versions list {run_dir}")
        request, what = VersionRequest("promote"), f"version {tested.version} goes live"
    elif tested is not None and arguments.step is None:
        request, what = VersionRequest("rollback"), f"version {tested.version} is rolled back"
    else:
        step = _target(run_dir, arguments.step, saved, records)
        request, what = VersionRequest("rollback", step), f"the policy returns to step {step}"
    write_request(run_dir, request)
    print(f"requested: {what}. tidegate versions list {run_dir} shows when it is done")
    return 0


def _target(run_dir: Path, step: int | None, saved: list[int], records: list[VersionRecord]) -> int:
    """Return the step of the checkpoint to return to. Raises ConfigError without one."""
    live = next((record.step for record in reversed(records) if record.state == "live"), 0)
    earlier = [one for one in saved if one < live]
    if step is None and earlier:
        return earlier[-1]
    if step is not None and step in earlier:
        return step
    available = ", ".join(map(str, earlier)) or "none; raise trainer.keep_checkpoints to keep more"
    asked = "no checkpoint is" if step is None else f"step {step} is no checkpoint"
    raise ConfigError(
        f"{run_dir}: {asked} earlier than the live version of step {live}; earlier: {available}"
    )


def _print(records: list[VersionRecord], saved: list[int], *, as_json: bool) -> None:
    if as_json:
        for record in records:
            print(json.dumps({**asdict(record), "checkpoint": record.step in saved}))
        return
    print(f"{'version':>12}{'step':>7}  {'time':<20}{'state':<14}{'checkpoint':<12}test")
    for record in records:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.time))
        kept = "kept" if record.step in saved else ""
        cells = f"{record.version:>12}{record.step:>7}  {at:<20}{record.state:<14}{kept:<12}"
        print((cells + (record.why or "")).rstrip())

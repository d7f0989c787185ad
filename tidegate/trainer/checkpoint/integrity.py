"""Checks the files of a run before it is resumed."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

import orjson

from tidegate.errors import LedgerError
from tidegate.trainer.checkpoint.checkpoint import Checkpoint
from tidegate.trainer.ledger.jsonl import complete_lines
from tidegate.trainer.records.metrics import read_metrics

_WEIGHTS = re.compile(r"(?:delta-)?v(\d+)")


class _InconsistentLedger(Exception):
    """The ledger lacks entries or has changed entries."""


def check_files(run_dir: Path, checkpoint: Checkpoint | None) -> None:
    """Compare the checkpoint with its checksums, and the ledger with the checkpoint and published versions.

    Raises CheckpointError, or LedgerError if ledger entries are missing or changed: their versions would be
    reused for other weights.
    """
    if checkpoint is not None:
        checkpoint.verify()
    ledger = run_dir / "ledger.jsonl"
    try:
        highest = _check_entries(ledger, checkpoint)
        if (published := _published(run_dir)) > highest:
            raise _InconsistentLedger(
                f"version {published} was published, but its highest version is {highest}"
            )
    except _InconsistentLedger as error:
        weights = "" if checkpoint is None else f" --model.path {checkpoint.path}"
        raise LedgerError(
            f"{ledger} cannot be resumed from: {error}. Restore a complete copy of the file, or continue "
            f"as a new run: tidegate train {run_dir / 'config.toml'}{weights} --run.name NEW"
        ) from error


def _check_entries(ledger: Path, checkpoint: Checkpoint | None) -> int:
    """Check entry numbers and the checksum of entries before the checkpoint; returns the highest version."""
    state = {} if checkpoint is None else checkpoint.state
    position, count, highest, checksum = int(state.get("ledger", 0)), 0, -1, 0
    for line in complete_lines(ledger):  # an incomplete last line was never acted on
        try:
            entry = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise _InconsistentLedger(f"line {count + 1} is damaged ({error})") from error
        if entry.get("seq") != count:
            raise _InconsistentLedger(f"line {count + 1} is entry {entry.get('seq')}, not {count}")
        if entry.get("event") in ("started", "publishing"):
            highest = max(highest, entry["version"])
        count += 1
        if count <= position:
            checksum = zlib.crc32(line, checksum)
    if count < position:
        raise _InconsistentLedger(f"it has {count:,} entries, but had {position:,} at the checkpoint")
    if checksum != state.get("ledger_checksum", checksum):
        raise _InconsistentLedger(f"its first {position:,} entries were changed since the checkpoint")
    return highest


def _published(run_dir: Path) -> int:
    """Return the highest version in metrics and published weights; −1 if there is none."""
    matches = (_WEIGHTS.fullmatch(path.name) for path in (run_dir / "weights").glob("*v*"))
    written = (int(match[1]) for match in matches if match)
    return max([-1, *written, *(int(line["version"]) for line in read_metrics(run_dir))])

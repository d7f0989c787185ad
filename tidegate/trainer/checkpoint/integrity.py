"""Checks the files of a run before it is resumed, so that nothing starts on what is damaged or incomplete."""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

import orjson

from tidegate.errors import LedgerError
from tidegate.trainer.checkpoint.checkpoint import Checkpoint
from tidegate.trainer.ledger.jsonl import complete_lines
from tidegate.trainer.records.metrics import read_metrics

_WEIGHTS = re.compile(r"v(\d+)")


class _Incomplete(Exception):
    """The ledger lacks entries, or has others than were written; the text says which."""


def check_files(run_dir: Path, checkpoint: Checkpoint | None) -> None:
    """Compares the checkpoint with its checksums, and the ledger with the checkpoint and with the versions
    that other files name.

    Raises CheckpointError, or LedgerError where entries are missing or changed: the versions in them would
    be given again to other weights.
    """
    if checkpoint is not None:
        checkpoint.verify()
    ledger = run_dir / "ledger.jsonl"
    try:
        highest = _check_entries(ledger, checkpoint)
        if (published := _published(run_dir)) > highest:
            raise _Incomplete(f"version {published} was published, and its highest version is {highest}")
    except _Incomplete as error:
        weights = "" if checkpoint is None else f" --model.path {checkpoint.path}"
        raise LedgerError(
            f"{ledger} cannot be resumed from: {error}. Put back a whole copy of the file, or train on as a "
            f"new run: tidegate train {run_dir / 'config.toml'}{weights} --run.name NEW"
        ) from error


def _check_entries(ledger: Path, checkpoint: Checkpoint | None) -> int:
    """Compares the entries' numbers, and those before the checkpoint with its checksum; returns the highest
    version."""
    state = {} if checkpoint is None else checkpoint.state
    position, count, highest, checksum = int(state.get("ledger", 0)), 0, -1, 0
    for line in _lines(ledger):
        try:
            entry = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise _Incomplete(f"line {count + 1} is damaged ({error})") from error
        if entry.get("seq") != count:
            raise _Incomplete(f"line {count + 1} is entry {entry.get('seq')}, not {count}")
        if entry.get("event") in ("started", "publishing"):
            highest = max(highest, entry["version"])
        count += 1
        if count <= position:
            checksum = zlib.crc32(line, checksum)
    if count < position:
        raise _Incomplete(f"it has {count:,} entries, and had {position:,} at the checkpoint")
    if checksum != state.get("ledger_checksum", checksum):
        raise _Incomplete(f"its first {position:,} entries were changed since the checkpoint")
    return highest


def _lines(ledger: Path) -> Iterator[bytes]:
    """The lines that end in a newline; what follows them was never acted upon."""
    _, whole = complete_lines(ledger)
    if whole:
        with ledger.open("rb") as file:
            yield from itertools.islice(file, whole)


def _published(run_dir: Path) -> int:
    """The highest version that metrics or written weights name; −1 without any."""
    matches = (_WEIGHTS.fullmatch(path.name) for path in (run_dir / "weights").glob("v*"))
    written = (int(match[1]) for match in matches if match)
    return max([-1, *written, *(int(line["version"]) for line in read_metrics(run_dir))])

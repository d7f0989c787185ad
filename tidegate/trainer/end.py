"""How a run has ended, and the ledger's entry of a start that failed before training began."""

from __future__ import annotations

import asyncio
import errno
from dataclasses import dataclass, field
from pathlib import Path

from tidegate.errors import StorageError, TidegateError
from tidegate.trainer.ledger.entries import entry
from tidegate.trainer.ledger.jsonl import DISK_FULL, remedy
from tidegate.trainer.ledger.ledger import Ledger
from tidegate.trainer.ledger.state import cancel_interrupted, read_ledger_state, restore_group
from tidegate.trainer.start import Start

DISK_ERRORS = (*DISK_FULL, errno.EIO, errno.EROFS)


@dataclass(slots=True)
class RunResult:
    """Result of a run; `initial_eval` and `final_eval` are metrics of its first and last evaluation."""

    status: str
    """`completed`, `interrupted` or `failed`, as in the ledger."""
    why: str | None
    step: int
    initial_eval: dict[str, float] = field(default_factory=dict)
    final_eval: dict[str, float] = field(default_factory=dict)


def how_failed(error: BaseException, run_dir: Path) -> tuple[str, str | None]:
    """Return the status of a run that ended with this error, and the reason if it failed."""
    if isinstance(error, asyncio.CancelledError):
        return "interrupted", None
    if isinstance(error, OSError):
        error = storage_error(error, run_dir) or error
    return "failed", str(error) if isinstance(error, TidegateError) else repr(error)


def storage_error(error: OSError, run_dir: Path) -> StorageError | None:
    """Return the error of a file with what to do; None if it is another error, such as of a connection."""
    if error.filename or error.errno in DISK_ERRORS:
        return StorageError(f"{error.filename or run_dir}: {error.strerror or error}; {remedy(error)}")
    return None


async def record_failed_start(ledger: Ledger, start: Start, error: BaseException) -> None:
    """Record the end of a start that failed after the ledger was opened and before training began.

    Groups that the start had taken over end `cancelled`, as at any end of a run. A start that failed before
    its own entry has taken none over: they stay live for the next one.

    Raises LedgerError or OSError if it cannot be recorded.
    """
    past = await asyncio.to_thread(read_ledger_state, ledger.path)
    if past.epoch == start.epoch:
        for group in past.discarded_groups():
            restore_group(past, group, ledger.record)
        for group in past.live():
            cancel_interrupted(past, group, ledger.record)
    status, why = how_failed(error, ledger.path.parent)
    step, version = start.step, start.version
    ledger.record(
        entry("run", "ended", epoch=start.epoch, step=step, version=version, status=status, why=why)
    )

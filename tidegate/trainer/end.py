"""How a run that failed has ended, and the ledger's entry of a start that failed before training began."""

from __future__ import annotations

import asyncio

from tidegate.errors import TidegateError
from tidegate.trainer.ledger.entries import entry
from tidegate.trainer.ledger.ledger import Ledger
from tidegate.trainer.ledger.state import cancel_interrupted, read_ledger_state, restore_group
from tidegate.trainer.start import Start


def how_failed(error: BaseException) -> tuple[str, str | None]:
    """Return the status of a run that ended with this error, and the reason if it failed."""
    if isinstance(error, asyncio.CancelledError):
        return "interrupted", None
    return "failed", str(error) if isinstance(error, TidegateError) else repr(error)


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
    status, why = how_failed(error)
    step, version = start.step, start.version
    ledger.record(
        entry("run", "ended", epoch=start.epoch, step=step, version=version, status=status, why=why)
    )

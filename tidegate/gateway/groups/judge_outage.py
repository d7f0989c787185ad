"""Waits for a judge that is unavailable, where what it judges cannot be made again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tidegate.errors import RewardUnavailableError
from tidegate.service.backoff import back_off

T = TypeVar("T")

log = logging.getLogger("tidegate.gateway")

OUTAGE_S = 3600.0
"""Seconds for which a call is repeated."""
FIRST_S, LONGEST_S = 1.0, 30.0
"""Delays between the calls."""


async def retry_while_unavailable(call: Callable[[], Awaitable[T]], what: str) -> T:
    """Repeats a call of the judge while the judge is unavailable.

    Args:
        call: Calls the judge.
        what: What waits, for the log.

    Returns:
        The result of the call.

    Raises:
        RewardUnavailableError: The judge is still unavailable after OUTAGE_S.
    """
    failures, end = 0, asyncio.get_running_loop().time() + OUTAGE_S
    while True:
        try:
            return await call()
        except RewardUnavailableError as error:
            # Checked after a call, so that one is made even if the last pause lasted beyond the end.
            if asyncio.get_running_loop().time() >= end:
                raise
            log.warning("%s: %s; it is called again", what, error)
        failures = await back_off(failures, FIRST_S, LONGEST_S)

"""Timeouts of connections that do not count the gateway's own lag.

Where thousands of sessions call at once, the event loop is seconds late. A timeout in wall-clock time then
ends connections that were made long ago, and that the loop has not come to look at: a healthy engine would be
taken for a broken one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

_TICKS = 20


@contextlib.asynccontextmanager
async def attentive_timeout(seconds: float) -> AsyncIterator[None]:
    """Raises TimeoutError after so many seconds, in which the loop has come round _TICKS times at least."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as timeout:

        def tick(left: int) -> None:
            if left == 0:
                timeout.reschedule(loop.time())
            else:
                next_tick[:] = [loop.call_later(seconds / _TICKS, tick, left - 1)]

        next_tick: list[asyncio.TimerHandle] = []
        tick(_TICKS)
        try:
            yield
        finally:
            next_tick[0].cancel()


class PatientConnector(aiohttp.TCPConnector):
    """Connections without a limit of number; one that is not made within `connect_s` fails."""

    def __init__(self, connect_s: float, keepalive_s: float) -> None:
        super().__init__(limit=0, keepalive_timeout=keepalive_s)
        self._connect_s = connect_s

    async def connect(self, *arguments: Any, **options: Any) -> Any:
        async with attentive_timeout(self._connect_s):
            return await super().connect(*arguments, **options)

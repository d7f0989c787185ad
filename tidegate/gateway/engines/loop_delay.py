"""Connection timeouts that exclude the gateway's own event-loop delay.

With thousands of concurrent sessions the event loop is late by seconds. A wall-clock timeout would then fail
connections that were established but not yet processed, and quarantine a healthy engine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

_TICKS = 20


@contextlib.asynccontextmanager
async def delay_tolerant_timeout(seconds: float) -> AsyncIterator[None]:
    """Raises TimeoutError after `seconds`, and not before the loop has run _TICKS iterations."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as timeout:

        def tick(remaining: int) -> None:
            if remaining == 0:
                timeout.reschedule(loop.time())
            else:
                next_tick[:] = [loop.call_later(seconds / _TICKS, tick, remaining - 1)]

        next_tick: list[asyncio.TimerHandle] = []
        tick(_TICKS)
        try:
            yield
        finally:
            next_tick[0].cancel()


class DelayTolerantConnector(aiohttp.TCPConnector):
    """TCP connector without a connection limit; connecting times out after `connect_s`."""

    def __init__(self, connect_s: float, keepalive_s: float) -> None:
        super().__init__(limit=0, keepalive_timeout=keepalive_s)
        self._connect_s = connect_s

    async def connect(self, *arguments: Any, **options: Any) -> Any:
        async with delay_tolerant_timeout(self._connect_s):
            return await super().connect(*arguments, **options)

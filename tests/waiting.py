"""Waiting for what tells nobody that it has come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


async def eventually(wanted: Callable[[], Any], timeout_s: float = 10.0) -> None:
    """Until something is true of a state that tells nobody when it changes."""
    async with asyncio.timeout(timeout_s):
        while not wanted():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.005)

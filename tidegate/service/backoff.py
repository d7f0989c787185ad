"""Delays between tries that fail."""

from __future__ import annotations

import asyncio
import random


def backoff_s(failures: int, first_s: float, longest_s: float, rng: random.Random | None = None) -> float:
    """Return the seconds to wait after a failure that `failures` others preceded without a success.

    The delay begins at `first_s` and doubles up to `longest_s`. Up to half of it is taken off at random, so
    that callers which failed together do not retry together.
    """
    delay_s = min(longest_s, first_s * 2.0 ** min(failures, 100))
    return (rng or random).uniform(delay_s / 2, delay_s)


async def back_off(failures: int, first_s: float, longest_s: float) -> int:
    """Wait as long as `backoff_s` says, and return the number of failures, with this one."""
    await asyncio.sleep(backoff_s(failures, first_s, longest_s))
    return failures + 1

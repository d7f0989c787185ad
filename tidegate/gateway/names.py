"""Names for what passes through: calls, requests to engines, tool calls."""

from __future__ import annotations

import random

_RANDOM = random.Random()  # of its own: what runs in this process may seed the one that all share


def unique_name() -> str:
    """32 hexadecimal digits, like no others. Not a secret: who has seen many could guess the next."""
    return f"{_RANDOM.getrandbits(128):032x}"

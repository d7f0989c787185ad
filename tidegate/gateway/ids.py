"""Names for what passes through: calls, requests to engines, tool calls."""

from __future__ import annotations

import random
import secrets
from hashlib import sha256

_RANDOM = random.Random()  # of its own: what runs in this process may seed the one that all share


def unique_name() -> str:
    """32 hexadecimal digits, like no others. Not a secret: who has seen many could guess the next."""
    return f"{_RANDOM.getrandbits(128):032x}"


def hash_key(key: str) -> bytes:
    return sha256(key.encode()).digest()


def new_key(mark: str = "") -> str:
    return f"tg-{mark}{secrets.token_urlsafe(24)}"


def new_id(mark: str = "") -> str:
    return mark + secrets.token_hex(12)
